"""vLLM's own arguments from an engine's start message: which ones Paceline sets, and which a user may add."""

import os
import secrets
import warnings
from collections.abc import Mapping
from typing import Any

import psutil

from actors.engine.vllm.versions import UnsupportedVllmError
from actors.engine.vllm.worker import EXTENSION
from actors.engine.wire import Start

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
V1_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process is already a child
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings concern settings made here on purpose
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines share a machine: rollout.engine.threads sets the number of each
    V1_SWITCH: "0",  # V2 keeps drafts on its own side: the scheduler's drafts would not reach it
}
_SEEDS = (1 << 31) - 1
_CPU_KV_BYTES = 1 << 32  # upper bound: the allocation follows from rollout.engine.kv_tokens


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads at import; existing ones stay."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning)  # from packages that vLLM imports


def require_v1(config: Any) -> None:
    """Refuse Model Runner V2, which drafts by itself. `config`: vLLM's VllmConfig.

    Raises UnsupportedVllmError if the switch is set, or an argument requires V2 (watermarks, HiSparse)."""
    if config.use_v2_model_runner:
        why = f"{V1_SWITCH}={os.environ.get(V1_SWITCH)}" if os.environ.get(V1_SWITCH) != "0" else "vllm_arguments"
        raise UnsupportedVllmError(
            "vLLM chose Model Runner V2, which takes no drafts from its scheduler, so rollout.speculation would do "
            f"nothing: leave {why} out, so that V1 is used (docs/howto/vllm.md)"
        )


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
        "worker_extension_cls": EXTENSION,
    }
    if on_cpu:
        at_most = min(_CPU_KV_BYTES, psutil.virtual_memory().available // 2)
        arguments |= {"kv_cache_memory_bytes": at_most, "gpu_memory_utilization": 0.05}
    return arguments | options.vllm_arguments
