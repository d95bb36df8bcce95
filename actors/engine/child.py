"""The child's end of a rollout engine in a child process: the loop around a core, independent of the backend.

A thread takes commands off the socket; the main thread applies them between engine steps and sends events after each
step.
"""

import os
import queue
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.engine import wire
from actors.engine.core import EngineCore, build_core
from actors.processes.child import hear, parent_link
from actors.processes.link import Close, Link, Ready
from contracts.rollout import EngineFailed


def main() -> None:
    with parent_link(EngineFailed) as link:
        serve(link, _build(link.receive()))


def _build(start: wire.Start) -> EngineCore:
    # An engine on a GPU only feeds it, and must run at once when the GPU is done.
    if not _on_gpu(start.options.device):
        with suppress(OSError):
            os.nice(start.niceness)
    return build_core(start)


def _on_gpu(device: str, control: Path = Path("/dev/nvidiactl")) -> bool:
    """Return whether the engine will run on a GPU, without importing torch."""
    if device != "auto":
        return device == "cuda"
    return control.exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")


def serve(link: Link, core: EngineCore) -> None:
    """Run the core until the parent closes it."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    hear(link, inbox)
    link.send([Ready()])
    while True:
        while not (core.has_work and inbox.empty()):
            message = inbox.get()
            if isinstance(message, Close):
                core.close()
                return
            answer = core.apply(*message)
            if answer is not None:
                link.send([answer])
        if events := core.step():
            link.send(events)
