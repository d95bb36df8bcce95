"""A rollout engine in a child process: the child's end. Owns the loop around the synchronous engine.

A thread takes commands off the socket; the main thread applies them between engine steps and sends events after each
step. When the socket closes, the parent is gone, and the process ends at once, in the middle of a step if need be.
"""

import os
import queue
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine import wire
from actors.engine.native.engine import NativeEngine
from actors.engine.types import DraftersSaved, EngineFailed, WeightsLoaded
from drafter.build import build_drafters
from models.checkpoint import load_model
from policies.speculation.build import build_policy

Inbox = queue.SimpleQueue[tuple[wire.Command, NDArray[np.uint8] | None]]


def main() -> None:
    # The terminal's Ctrl-C goes to the whole process group; when to stop is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    try:
        _serve(connection)
    except Exception as error:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        with suppress(OSError):
            connection.send([EngineFailed(f"{type(error).__name__}: {error}", text)])
        # A moment for the parent to read it; exit code 1 marks a failure that told its reason.
        connection.close()
        os._exit(1)
    os._exit(0)  # Not through interpreter shutdown: torch's thread pools may take long to end, and own nothing.


def _serve(connection: Connection) -> None:
    start = connection.recv()
    with suppress(OSError):
        os.nice(start.niceness)
    engine = _build(start)
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(connection, inbox), name="commands", daemon=True).start()
    connection.send([wire.Ready(engine.capabilities)])
    while True:
        while not (engine.has_work and inbox.empty()):
            command, memory = inbox.get()
            if isinstance(command, wire.Close):
                return
            answer = _apply(engine, command, memory)
            if answer is not None:
                connection.send([answer])
        events = engine.step()
        if events:
            connection.send(events)


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
    invariant = model_options.batch_invariant
    model = load_model(
        model_options.path,
        dtype=getattr(torch, model_options.dtype),
        device=device,
        batch_invariant=device == "cpu" if invariant is None else invariant,
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
    )


def _read_commands(connection: Connection, inbox: Inbox) -> None:
    try:
        while True:
            command = connection.recv()
            memory = None
            if isinstance(command, wire.UpdateWeights):
                memory = wire.shared_bytes(reduction.recv_handle(connection), command.total_bytes)
            inbox.put((command, memory))
    except (EOFError, OSError):
        os._exit(0)  # The parent is gone; nobody is left to tell.


def _apply(
    engine: NativeEngine, command: wire.Command, memory: NDArray[np.uint8] | None
) -> WeightsLoaded | DraftersSaved | None:
    match command:
        case wire.Submit(requests):
            engine.submit(requests)
        case wire.Abort(request_ids):
            engine.abort(request_ids)
        case wire.UpdateWeights(manifest, _):
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
        case wire.Start() | wire.Close():
            raise ValueError(f"unexpected command {command}")
    return None
