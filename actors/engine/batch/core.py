"""An engine as its process drives it: commands to calls. Owns what is answered; what commands do is the engine's."""

from collections.abc import Sequence
from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from actors.engine.shared_rollouts import unpack
from contracts.engine import (
    Abort,
    EngineCommand,
    LoadDrafters,
    ReceiveWeights,
    Remember,
    SaveDrafters,
    Sleep,
    Submit,
    UpdateDrafter,
    UpdateWeights,
    Wake,
)
from contracts.handoff import Offer
from contracts.rollout import Answer, DrafterLoaded, DraftersSaved, Event, Request, Slept, WeightsLoaded
from models.manifest import WeightsManifest

Bytes = NDArray[np.uint8]
TokenLists = list[NDArray[np.int32]]


class BatchEngine(Protocol):
    """Decodes many requests together, in this process; actors.engine.native.engine says what each call does."""

    @property
    def has_work(self) -> bool: ...
    def submit(self, requests: Sequence[Request]) -> None: ...
    def abort(self, request_ids: Sequence[int]) -> None: ...
    def update_weights(self, manifest: WeightsManifest, buffer: Bytes) -> WeightsLoaded: ...
    def receive_weights(self, offer: Offer) -> WeightsLoaded: ...
    def update_drafter(self, name: str, manifest: WeightsManifest, buffer: Bytes) -> DrafterLoaded: ...
    def remember(self, prompts: TokenLists, responses: TokenLists) -> None: ...
    def save_drafters(self, directory: str) -> str | None: ...
    def load_drafters(self, directory: str) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def step(self) -> list[Event]: ...
    def close(self) -> None: ...


class BatchCore:
    """EngineCore over an engine."""

    def __init__(self, engine: BatchEngine) -> None:
        self._engine = engine

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def apply(self, command: EngineCommand, memory: Bytes | None) -> Answer | None:
        engine = self._engine
        match command:
            case Submit(requests):
                engine.submit(requests)
            case Abort(request_ids):
                engine.abort(request_ids)
            case UpdateWeights(manifest):
                return engine.update_weights(manifest, _given(memory))
            case ReceiveWeights(offer):
                return engine.receive_weights(offer)
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
        self._engine.close()


def _given(memory: Bytes | None) -> Bytes:
    if memory is None:
        raise ValueError("the command came without the memory that belongs to it")
    return memory
