"""The vLLM engine as an engine process drives it: commands to calls. Owns how it starts and what it answers; what the
commands do is the engine's. Imports vLLM only when an engine is built."""

import logging
from typing import Any, assert_never

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
from actors.engine.shared_rollouts import unpack
from actors.engine.types import Answer, DrafterLoaded, DraftersSaved, Event, Slept
from actors.engine.vllm.arguments import engine_arguments, prepare_environment
from actors.engine.vllm.engine import VllmEngine
from actors.engine.vllm.versions import check_version
from actors.engine.wire import Start
from drafter.build import build_retrieval, wanted_drafters
from models.device import choose_device
from policies.speculation.build import build_policy

_log = logging.getLogger(__name__)


class VllmCore:
    """EngineCore over a VllmEngine."""

    def __init__(self, engine: VllmEngine) -> None:
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
                return DrafterLoaded(name, manifest.version, manifest.checksum, 0.0, f"there is no drafter {name!r}")
            case _:
                assert_never(command)
        return None

    def step(self) -> list[Event]:
        return self._engine.step()

    def close(self) -> None:
        self._engine.close()


def build(start: Start) -> VllmCore:
    """The engine that serves the model at `start.model.path`. Raises UnsupportedVllmError."""
    installed = check_version()
    prepare_environment()
    from actors.engine.vllm.backend import VllmBackend

    options = start.options
    device = choose_device(options.device, "rollout.engine.device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    speculation = start.speculation
    seeded = device == "cpu" if options.seeded_requests is None else options.seeded_requests
    policy = None
    speculative: dict[str, Any] | None = None
    if drafting := sorted(wanted_drafters(speculation)):
        policy = build_policy(speculation, drafting, trees=False)
    if policy is not None:
        speculative = {
            "method": "custom_class",
            "model": "actors.engine.vllm.proposer.NoProposer",
            "num_speculative_tokens": policy.max_nodes,
        }
    max_nodes = 0 if policy is None else policy.max_nodes
    gpus = torch.cuda.device_count()
    arguments = engine_arguments(start, device=device, gpus=gpus, max_nodes=max_nodes, speculative=speculative)
    backend = VllmBackend(arguments, seeded=seeded)
    drafters = build_retrieval(speculation, options.max_running, backend.model_tokens)
    _log.info("%s %s", installed.distribution, installed.version)
    engine = VllmEngine(
        backend,
        max_running=options.max_running,
        progress_every_tokens=options.progress_every_tokens,
        weights_version=start.weights_version,
        drafters=drafters,
        policy=policy,
    )
    return VllmCore(engine)


def _given(memory: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    if memory is None:
        raise ValueError("the command came without the memory that belongs to it")
    return memory
