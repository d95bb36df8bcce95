"""What of vLLM's inside the adapter stands on, looked for in vLLM's source. Imports no vLLM, so any release will do:

    unzip vllm-0.33.0-*.whl -d 0.33.0 && python -m tests.vllm.surface 0.33.0/vllm

prints what is missing. A call that fits says nothing of what it does: that is for the other tests here.
"""

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_RUNNER, _SCHEDULER = "v1/worker/gpu_model_runner.py", "v1/core/sched/scheduler.py"
# File, and what it has: functions and methods with the parameters that we name or pass by place, in their order; fields
# of a class, and what instances are given (as `Class.field`), with None.
SURFACE: Mapping[str, Mapping[str, Sequence[str] | None]] = {
    "v1/engine/core.py": {
        "EngineCore.__init__": ("vllm_config", "executor_class", "log_stats"),
        "EngineCore.step": (),
        "EngineCore.post_step": ("model_executed",),
        "EngineCore.add_request": ("request",),
        "EngineCore.abort_requests": ("request_ids",),
        "EngineCore.reset_prefix_cache": (),
        "EngineCore.collective_rpc": ("method", "timeout", "args", "kwargs"),
        "EngineCore.sleep": ("level",),
        "EngineCore.wake_up": (),
        "EngineCore.shutdown": (),
        **dict.fromkeys(f"EngineCore.{x}" for x in ("vllm_config", "scheduler", "step_fn", "request_block_hasher")),
    },
    "v1/executor/abstract.py": {"Executor.get_class": ("vllm_config",)},
    "engine/arg_utils.py": {
        "EngineArgs.create_engine_config": ("usage_context",),
        **dict.fromkeys(
            f"EngineArgs.{x}"
            for x in (
                "model", "skip_tokenizer_init", "dtype", "seed", "max_model_len", "max_num_seqs",
                "max_num_batched_tokens", "num_gpu_blocks_override", "logprobs_mode", "scheduler_cls",
                "async_scheduling", "speculative_config", "tensor_parallel_size", "distributed_executor_backend",
                "worker_extension_cls", "disable_log_stats", "enable_sleep_mode", "enforce_eager",
                "kv_cache_memory_bytes", "gpu_memory_utilization", "block_size",
            )
        ),
    },
    "envs.py": {"VLLM_USE_V2_MODEL_RUNNER": None, "VLLM_ENABLE_V1_MULTIPROCESSING": None},
    "sampling_params.py": dict.fromkeys(
        f"SamplingParams.{x}"
        for x in ("temperature", "top_k", "top_p", "seed", "max_tokens", "logprobs", "ignore_eos", "detokenize")
    ),
    "v1/request.py": {
        "Request.__init__": ("request_id", "prompt_token_ids", "sampling_params", "pooling_params", "block_hasher"),
        "Request.update_block_hashes": (),
        "Request.num_output_tokens": (),
        **dict.fromkeys(f"Request.{x}" for x in ("spec_token_ids", "cache_salt", "block_hashes", "request_id")),
        "RequestStatus.FINISHED_STOPPED": None,
    },
    _SCHEDULER: {
        "Scheduler.schedule": (),
        "Scheduler.update_from_output": ("scheduler_output", "model_runner_output"),
        "Scheduler._update_request_with_output": ("request", "new_token_ids"),
        "Scheduler._preempt_request": ("request", "timestamp"),
        "Scheduler.has_requests": (),
        **dict.fromkeys(f"Scheduler.{x}" for x in ("running", "kv_cache_manager", "prev_step_scheduled_req_ids")),
    },
    "v1/core/kv_cache_manager.py": {"KVCacheManager.usage": (), "KVCacheManager.block_pool": None},
    "v1/core/block_pool.py": {"BlockPool.evict_blocks": ("block_ids",), "BlockPool.blocks": None},
    "v1/core/sched/output.py": dict.fromkeys(
        f"SchedulerOutput.{x}"
        for x in ("num_scheduled_tokens", "scheduled_spec_decode_tokens", "num_spec_tokens_to_schedule")
    ),
    "v1/outputs.py": dict.fromkeys(
        (
            "ModelRunnerOutput.req_id_to_index", "ModelRunnerOutput.sampled_token_ids", "ModelRunnerOutput.logprobs",
            "LogprobsLists.logprobs", "LogprobsLists.cu_num_generated_tokens", "LogprobsTensors.logprob_token_ids",
            "LogprobsTensors.logprobs", "LogprobsTensors.selected_token_ranks",
        )
    ),
    _RUNNER: {
        "GPUModelRunner.get_model": (),
        "GPUModelRunner.get_draft_model": (),
        "GPUModelRunner._bookkeeping_sync": (),
        "GPUModelRunner.execute_model": ("scheduler_output",),
        "GPUModelRunner._sample": ("logits", "spec_decode_metadata"),
        "GPUModelRunner._get_spec_decode_draft_probs": ("spec_decode_metadata",),
        **dict.fromkeys(
            f"GPUModelRunner.{x}"
            for x in (
                "input_batch", "requests", "drafter", "discard_request_mask", "vllm_config", "speculative_config",
                "sampler",
            )
        ),
    },
    "v1/sample/sampler.py": {"Sampler.gather_logprobs": ("logprobs", "num_logprobs", "token_ids")},
    "v1/spec_decode/llm_base_proposer.py": {
        "SpecDecodeBaseProposer.propose": ("num_speculative_tokens", "common_attn_metadata"),
        "SpecDecodeBaseProposer._draft_attn_layer_names": None,
        "SpecDecodeBaseProposer._last_draft_probs": None,
        "SpecDecodeBaseProposer.parallel_drafting": None,
        "SpecDecodeBaseProposer.num_speculative_tokens": None,
    },
    "v1/attention/backend.py": {"CommonAttentionMetadata.batch_size": ()},
    "v1/spec_decode/custom_class_proposer.py": {"create_custom_proposer": ("vllm_config",)},
    "v1/sample/rejection_sampler.py": {
        "expand_batch_to_tokens": ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    },
    "model_executor/model_loader/reload/layerwise.py": {
        "initialize_layerwise_reload": ("model",),
        "finalize_layerwise_processing": ("model", "model_config"),
        "finalize_layerwise_reload": (),
    },
    "config/vllm.py": {"set_current_vllm_config": ("vllm_config",), "VllmConfig.use_v2_model_runner": ()},
    "utils/torch_utils.py": {"set_default_torch_dtype": ("dtype",)},
}  # fmt: skip


# What drafts of ours need in Model Runner V2 (actors/engine/vllm/runner_v2.py).
SURFACE_V2: Mapping[str, Mapping[str, Sequence[str] | None]] = {
    "v1/worker/gpu/model_runner.py": {
        "GPUModelRunner.prepare_inputs": ("scheduler_output",),
        "GPUModelRunner.get_model": (),
        "GPUModelRunner.req_states": None,
        "GPUModelRunner.speculator": None,
    },
    "v1/worker/gpu/spec_decode/__init__.py": {"init_speculator": ("vllm_config", "device", "req_states")},
    "v1/worker/gpu/spec_decode/speculator.py": {
        "BaseSpeculator.init_cudagraph_manager": ("cudagraph_mode",),
        "BaseSpeculator.capture": (),
        "BaseSpeculator.propose": ("input_batch", "num_speculative_tokens"),
        "BaseSpeculator.num_query_per_req": None,
    },
    "v1/worker/gpu/states.py": {"RequestState.draft_tokens": None, "RequestState.req_id_to_index": None},
    "v1/worker/gpu/input_batch.py": {
        "InputBatch.num_reqs": None,
        "combine_sampled_and_draft_tokens": ("draft_tokens", "cu_num_logits"),
    },
}


def missing(root: Path, surface: Mapping[str, Mapping[str, Sequence[str] | None]] = SURFACE) -> list[str]:
    """What the package in this folder has not, as `file: name` or `file: name(parameter)`."""
    return [f"{file}: {fault}" for file, names in surface.items() for fault in _missing(root / file, names)]


def _missing(file: Path, names: Mapping[str, Sequence[str] | None]) -> Iterator[str]:
    found = _names(ast.parse(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    for name, parameters in names.items():
        if name not in found:
            yield name
            continue
        have = found[name]
        yield from (f"{name}({parameter})" for parameter in parameters or () if parameter not in have)


def _names(tree: ast.Module) -> dict[str, list[str]]:
    """Every function, class member and instance attribute, with the parameters of what takes some."""
    found: dict[str, list[str]] = {}
    for node in tree.body:
        found |= _members(node, "")
        if not isinstance(node, ast.ClassDef):
            continue
        for member in node.body:
            found |= _members(member, f"{node.name}.")
            for part in ast.walk(member):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    found.setdefault(f"{node.name}.{part.attr}", [])
    return found


def _members(node: ast.stmt, prefix: str) -> dict[str, list[str]]:
    """What this statement alone makes."""
    if isinstance(node, ast.FunctionDef):
        return {prefix + node.name: _parameters(node)}
    return {prefix + name: [] for name in _assigned(node)}


def _assigned(node: ast.stmt) -> Iterator[str]:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
    yield from (target.id for target in targets if isinstance(target, ast.Name))
    if isinstance(node, ast.If):  # under TYPE_CHECKING
        yield from (name for part in node.body for name in _assigned(part))


def _parameters(node: ast.FunctionDef) -> list[str]:
    a = node.args
    return [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]


if __name__ == "__main__":
    sys.exit("\n".join(missing(Path(sys.argv[1]))) or 0)
