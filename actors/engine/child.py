"""A rollout engine in a child process: the child's end. Owns the loop around a core, and knows no backend.

A thread takes commands off the socket; the main thread applies them between engine steps and sends events after each
step.
"""

import os
import queue
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.engine import wire
from actors.engine.core import EngineCore, build_core
from actors.processes.child import hear, run_child
from actors.processes.link import Link, Message
from contracts.rollout import EngineFailed, Event, Recorded


def main() -> None:
    run_child(lambda link: serve(link, _build), EngineFailed)


def _build(start: wire.Start) -> EngineCore:
    # An engine on a GPU only feeds it, and needs its core the moment the GPU is done.
    if not _on_gpu(start.options.device):
        with suppress(OSError):
            os.nice(start.niceness)
    return build_core(start)


def _on_gpu(device: str, control: Path = Path("/dev/nvidiactl")) -> bool:
    """Whether the engine will run on a GPU, found out without torch."""
    if device != "auto":
        return device == "cuda"
    return control.exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")


def serve(link: Link, build: Callable[[Any], EngineCore]) -> None:
    """Run the core that `build` makes of the first message, until it is closed."""
    start, _ = link.receive()
    core = build(start)
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    hear(link, inbox.put)
    link.send([wire.Ready()])
    while True:
        while not (core.has_work and inbox.empty()):
            command, memory = inbox.get()
            if isinstance(command, wire.Close):
                core.close()
                return
            answer = core.apply(command, memory)
            if answer is not None:
                link.send([answer])
        _send(link, core.step())


def _send(link: Link, events: list[Event]) -> None:
    """In order; recorded states travel as memory."""
    while events:
        size = next((i for i, event in enumerate(events) if isinstance(event, Recorded) and event.records), len(events))
        if size:
            link.send(events[:size])
        if size < len(events):
            recorded = events[size]
            assert isinstance(recorded, Recorded)
            header, memory = wire.RecordedHeader.split(recorded)
            link.send([header], memory)
        events = events[size + 1 :]
