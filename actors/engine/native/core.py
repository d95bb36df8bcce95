"""The native engine as an engine process drives it: commands to calls. Owns how it starts and what it answers; what the
commands do is the engine's."""

from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine.commands import (
    Abort,
    EngineCommand,
    LoadDrafters,
    Remember,
    SaveDrafters,
    Sleep,
    Submit,
    UpdateDrafter,
    UpdateWeights,
    Wake,
)
from actors.engine.native.engine import NativeEngine
from actors.engine.shared_rollouts import unpack
from actors.engine.types import Answer, DraftersSaved, Event, Slept
from actors.engine.wire import Start
from drafter.build import build_drafters
from models.checkpoint import load_model
from models.device import choose_device
from models.options import batch_invariance
from policies.speculation.build import build_policy


class NativeCore:
    """EngineCore over a NativeEngine."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def apply(self, command: EngineCommand, memory: NDArray[np.uint8] | None) -> Answer | None:
        engine = self._engine
        match command:
            case Submit(requests):
                engine.submit(requests)
            case Abort(request_ids):
                engine.abort(request_ids)
            case UpdateWeights(manifest):
                return engine.update_weights(manifest, _given(memory))
            case Sleep():
                try:
                    engine.sleep()
                except ValueError as error:
                    return Slept(str(error))
                return Slept()
            case Wake():
                engine.wake()
            case Remember(own_index):
                engine.remember(*unpack(_given(memory), own_index))
            case SaveDrafters(directory):
                return DraftersSaved(directory, engine.save_drafters(directory))
            case LoadDrafters(directory):
                engine.load_drafters(directory)
            case UpdateDrafter(name, manifest):
                return engine.update_drafter(name, manifest, _given(memory))
            case _:
                assert_never(command)
        return None

    def step(self) -> list[Event]:
        return self._engine.step()

    def close(self) -> None:
        """Nothing of it outlives the process."""


def build(start: Start) -> NativeCore:
    """The engine that serves the model at `start.model.path`."""
    torch.manual_seed(start.seed)
    options, key = start.options, "rollout.engine.device"
    device = choose_device(options.device, key)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load_model(
        start.model.path,
        dtype=getattr(torch, start.model.dtype),
        device=device,
        batch_invariant=batch_invariance(start.model, device, key),
    )
    speculation = start.speculation
    drafters, policy = {}, None
    if speculation.mode != "off":
        drafters = build_drafters(speculation, model, options)
        policy = build_policy(speculation, list(drafters))
    engine = NativeEngine(
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
    return NativeCore(engine)


def _given(memory: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    if memory is None:
        raise ValueError("the command came without the memory that belongs to it")
    return memory
