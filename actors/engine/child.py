"""A rollout engine in a child process: the child's end. Owns the loop around the synchronous engine.

A thread takes commands off the socket; the main thread applies them between engine steps and sends events after each
step.
"""

import os
import queue
from contextlib import suppress

import torch

from actors.engine import wire
from actors.engine.native.engine import NativeEngine
from actors.engine.types import DrafterLoaded, DraftersSaved, EngineFailed, Event, Recorded, WeightsLoaded
from actors.processes.child import hear, run_child
from actors.processes.link import Bytes, Link, Message
from drafter.build import build_drafters
from models.checkpoint import load_model
from models.options import batch_invariance
from policies.speculation.build import build_policy


def main() -> None:
    run_child(_serve, EngineFailed)


def _serve(link: Link) -> None:
    start, _ = link.receive()
    with suppress(OSError):
        os.nice(start.niceness)
    engine = _build(start)
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    hear(link, inbox.put)
    link.send([wire.Ready(engine.capabilities)])
    while True:
        while not (engine.has_work and inbox.empty()):
            command, memory = inbox.get()
            if isinstance(command, wire.Close):
                return
            answer = _apply(engine, command, memory)
            if answer is not None:
                link.send([answer])
        _send(link, engine.step())


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


def _build(start: wire.Start) -> NativeEngine:
    torch.manual_seed(start.seed)
    options, model_options = start.options, start.model
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("rollout.engine.device=cuda, but this machine has no CUDA device: use auto or cpu")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load_model(
        model_options.path,
        dtype=getattr(torch, model_options.dtype),
        device=device,
        batch_invariant=batch_invariance(model_options, device, "rollout.engine.device"),
    )
    speculation = start.speculation
    drafters, policy = {}, None
    if speculation.mode != "off":
        drafters = build_drafters(speculation, model, options)
        policy = build_policy(speculation, list(drafters))
    return NativeEngine(
        model,
        options,
        weights_version=start.weights_version,
        drafters=drafters,
        policy=policy,
        verification=speculation.verification,
        hidden_tokens=speculation.eagle.context_tokens,
        recording_bytes=start.recording_bytes,
        recorded_layers=start.recorded_layers,
    )


def _apply(
    engine: NativeEngine, command: wire.Command, memory: Bytes | None
) -> WeightsLoaded | DraftersSaved | DrafterLoaded | None:
    match command:
        case wire.Submit(requests):
            engine.submit(requests)
        case wire.Abort(request_ids):
            engine.abort(request_ids)
        case wire.UpdateWeights(manifest):
            assert memory is not None
            return engine.update_weights(manifest, memory)
        case wire.Sleep():
            engine.sleep()
        case wire.Wake():
            engine.wake()
        case wire.Remember(prompts, responses):
            engine.remember(list(prompts), list(responses))
        case wire.SaveDrafters(directory):
            return DraftersSaved(directory, engine.save_drafters(directory))
        case wire.LoadDrafters(directory):
            engine.load_drafters(directory)
        case wire.UpdateDrafter(name, manifest):
            assert memory is not None
            return engine.update_drafter(name, manifest, memory)
        case wire.Start() | wire.Close():
            raise ValueError(f"unexpected command {command}")
    return None
