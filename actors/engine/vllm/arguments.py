"""vLLM's own arguments from an engine's start message: which ones Paceline sets, and which a user may add."""

import os
import secrets
import warnings
from collections.abc import Mapping
from typing import Any

from actors.engine.vllm.versions import V2_SWITCH, UnsupportedVllmError
from actors.engine.vllm.worker import EXTENSION, EXTENSION_V2
from actors.engine.wire import Start
from actors.host_memory import available_bytes

# Set by Paceline; the engine depends on each of these.
OURS = frozenset(
    {
        "model",
        "skip_tokenizer_init",
        "dtype",
        "seed",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_gpu_blocks_override",  # from rollout.engine.kv_tokens (backend.py)
        "logprobs_mode",
        "scheduler_cls",
        "async_scheduling",
        "speculative_config",
        "tensor_parallel_size",
        "distributed_executor_backend",
        "worker_extension_cls",
        "disable_log_stats",
        "enable_sleep_mode",
    }
)
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process is already a child
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings concern settings made here on purpose
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines share a machine: rollout.engine.threads sets the number of each
    V2_SWITCH: "0",  # V1 takes drafts of networks too
}
_SEEDS = (1 << 31) - 1
_CPU_KV_BYTES = 1 << 32  # upper bound: the allocation follows from rollout.engine.kv_tokens


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads at import; existing ones stay."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning)  # from packages that vLLM imports


def asks_for_v2() -> bool:
    """Whether the environment asks for Model Runner V2, as vLLM reads it."""
    return os.environ.get(V2_SWITCH, "0") not in ("", "0")


def require_runner(config: Any) -> None:
    """Raises UnsupportedVllmError unless vLLM chose the runner that the environment asks for. `config`: its
    VllmConfig."""
    if config.use_v2_model_runner and not asks_for_v2():
        raise UnsupportedVllmError(
            "vLLM chose Model Runner V2 because of vllm_arguments, and rollout.speculation would do nothing there: "
            f"leave them out, or set {V2_SWITCH}=1 (docs/howto/vllm.md)"
        )
    if asks_for_v2() and not config.use_v2_model_runner:
        raise UnsupportedVllmError(f"{V2_SWITCH} asks for Model Runner V2, and vLLM chose V1")


def engine_arguments(
    start: Start, *, device: str, ranks: int, max_nodes: int, speculative: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return vLLM's EngineArgs. `ranks`: processes that execute the model, one per GPU. `max_nodes`: most drafted
    tokens per request and step.

    Raises ValueError for an entry of rollout.engine.vllm_arguments that Paceline sets itself.
    """
    options = start.options
    taken = sorted(OURS & options.vllm_arguments.keys())
    if taken:
        raise ValueError(
            f"rollout.engine.vllm_arguments: {', '.join(taken)} cannot be set there: Paceline sets it from "
            "rollout.engine, rollout.speculation or model"
        )
    if start.quantization != "none" and "quantization" in options.vllm_arguments:
        raise ValueError(
            f"rollout.engine.vllm_arguments: quantization cannot be set beside rollout.quantization="
            f"{start.quantization}: leave one of them out"
        )
    on_cpu = device == "cpu"
    arguments: dict[str, Any] = {
        "model": start.model.path,
        "skip_tokenizer_init": True,
        "dtype": start.model.dtype,
        # Requests without generators draw from one with this seed: two workers must not share its noise.
        "seed": start.seed & _SEEDS if options.seeded_requests else secrets.randbits(31),
        "max_model_len": options.max_model_tokens,
        "max_num_seqs": options.max_running,
        "max_num_batched_tokens": options.prefill_chunk_tokens + options.max_running * (1 + max_nodes),
        "logprobs_mode": "processed_logprobs",
        "scheduler_cls": f"{__package__}.scheduler.PacelineScheduler",
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,  # stderr must stay clean: the supervisor shows it for a lost engine
        "enforce_eager": not (on_cpu or options.cuda_graphs),  # compiled on CPUs, as is vLLM's default
        "enable_sleep_mode": not on_cpu,
        "speculative_config": None if speculative is None else dict(speculative),
        "tensor_parallel_size": ranks,
        "distributed_executor_backend": "uni" if ranks == 1 else "mp",
        "worker_extension_cls": EXTENSION_V2 if asks_for_v2() else EXTENSION,
    }
    if on_cpu:
        at_most = min(_CPU_KV_BYTES, available_bytes() // 2)
        arguments |= {"kv_cache_memory_bytes": at_most, "gpu_memory_utilization": 0.05}
    return arguments | options.vllm_arguments
