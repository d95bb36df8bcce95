"""Start of the vLLM engine in its process. Imports vLLM only when an engine is built."""

import logging
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from actors.engine.calibrated import calibrated
from actors.engine.vllm.arguments import asks_for_v2, engine_arguments, prepare_environment
from actors.engine.vllm.engine import VllmEngine
from actors.engine.vllm.low_bit import low_bit_target
from actors.engine.vllm.model_drafters import ModelDrafter, eagle_drafter, foreign_drafter, self_drafter
from actors.engine.vllm.proposer import NO_PROPOSER
from actors.engine.vllm.runner_v2 import METHOD
from actors.engine.vllm.versions import V2_SWITCH, UnsupportedVllmError, check_runner_v2, check_version
from actors.engine.vllm.worker_drafts import WorkerDrafter
from actors.engine.wire import Start
from config.catalogue import CATALOGUE, weights_path
from drafter.build import build_retrieval, wanted_drafters
from models.config import read_config
from models.device import choose_device
from policies.speculation.build import build_policy

DRAWN_BYTES = 256 << 20  # at most, of the probabilities by which drafts were drawn; else the most probable are drafted
_log = logging.getLogger(__name__)


def build(start: Start) -> VllmEngine:
    """Build the engine that serves the model at `start.model.path`. Raises UnsupportedVllmError; ValueError for options
    that rollout.quantization excludes."""
    installed = check_version()
    prepare_environment()
    if asks_for_v2():
        check_runner_v2(installed)
    options, speculation = start.options, start.speculation
    device = choose_device(options.device, "rollout.engine.device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    most = torch.cuda.device_count() if device == "cuda" else 1
    ranks = start.options.tensor_parallel or most  # this process sees only its engine's GPUs
    names = wanted_drafters(speculation)
    network = _network(names)
    if network is not None and asks_for_v2():
        raise UnsupportedVllmError(
            f"{network} drafts on Model Runner V1 only: leave {V2_SWITCH} out, or draft with suffix and ngram "
            "(docs/howto/vllm.md)"
        )
    costs, news = calibrated(start, device, f"vllm {installed.version}")
    policy = build_policy(speculation, sorted(names), trees=False, lag=0 if network is None else 1, costs=costs)
    max_nodes = 0 if policy is None else policy.max_nodes
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="paceline-vllm-")))
        target = low_bit_target(start.model, start.quantization, directory / "target")
        drafter: ModelDrafter | None = None
        speculative: dict[str, Any] | None = None
        if network is not None and policy is not None:
            drafter = _model_drafter(network, start, directory)
            vocabulary = int(read_config(start.model.path)["vocab_size"])
            drawn = 4 * vocabulary * max_nodes * options.max_running <= DRAWN_BYTES
            speculative = drafter.speculative_config(max_nodes, ranks, drawn=drawn)
        elif policy is not None:
            none: Mapping[str, Any] = METHOD if asks_for_v2() else {"method": "custom_class", "model": NO_PROPOSER}
            speculative = {**none, "num_speculative_tokens": max_nodes}
        from actors.engine.vllm.backend import VllmBackend  # imports vLLM

        start = replace(start, model=target)
        arguments = engine_arguments(start, device=device, ranks=ranks, max_nodes=max_nodes, speculative=speculative)
        backend = VllmBackend(arguments, kv_tokens=options.kv_tokens, seeded=options.seeded_requests, drafter=drafter)
    _log.info("engine: %s %s on %s", installed.distribution, installed.version, device)
    return VllmEngine(
        backend,
        max_running=options.max_running,
        progress_every_tokens=options.progress_every_tokens,
        weights_version=start.weights_version,
        quantization=start.quantization,
        drafters=build_retrieval(speculation, options.max_running, backend.model_tokens),
        worker=None
        if drafter is None or network is None
        else WorkerDrafter(network, copies_target=drafter.copies_target),
        policy=policy,
        news=None if policy is None else news,
    )


def _network(names: Collection[str]) -> str | None:
    """Return the network drafter among the names, if any."""
    networks = [name for name in CATALOGUE if name in names and CATALOGUE[name].is_network]
    if len(networks) > 1:
        raise ValueError(
            f"rollout.speculation.strategies names {' and '.join(networks)}: vLLM drafts with one network per "
            "engine, so leave all but one of them out"
        )
    return networks[0] if networks else None


def _model_drafter(name: str, start: Start, out: Path) -> ModelDrafter:
    if name == "self":
        if start.quantization != "none":
            raise ValueError(
                f"rollout.speculation.strategies names self beside rollout.quantization={start.quantization}: an "
                "eight-bit copy is no cheaper than such a target; draft with ngram, suffix or eagle"
            )
        return self_drafter(Path(start.model.path), out / name)
    path = weights_path(name, start.speculation)
    assert path is not None, "wanted_drafters has seen to it"
    if CATALOGUE[name].foreign:
        return foreign_drafter(name, path, Path(start.model.path))
    return eagle_drafter(path, Path(start.model.path), out / name, dtype=getattr(torch, start.model.dtype))
