"""The model, data and rollouts, by the names of others."""

from typing import Any

from launch.config.foreign_names.answers import ALWAYS, NOT_HERE, Answer, Row, Written, same, say, switch, words
from launch.config.schema import render

_BATCH = "rollout.prompts_per_step"


def _generation_batch(value: Any, written: Written) -> str:
    """TRL counts completions, we prompts."""
    group = written.get("num_generations", written.get("rollouts_per_prompt", 8))
    if isinstance(value, int) and isinstance(group, int) and group > 0 and value % group == 0:
        return f"{_BATCH}={value // group}"
    return f"{_BATCH}: completions / num_generations"


def _files(key: str) -> Answer:
    def answer(value: Any, _: Written) -> str:
        one = value[0] if isinstance(value, list) and len(value) == 1 else value
        return f"{key}={one}" if isinstance(one, str) else f"{key}: one file, or a folder with all of them"

    return answer


def _targets(value: Any, _: Written) -> str:
    if value == "all-linear":
        return "leave it out: that is how it is here"
    return f"learner.lora.targets={render([value] if isinstance(value, str) else value)}"


ROWS: tuple[Row, ...] = (
    # the model
    Row(
        ("actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B",),
        ("model_name_or_path=Qwen/Qwen2.5-0.5B",),
        same("model.path"),
        ("pretrain", "model_name"),
    ),
    Row((), ("torch_dtype=bfloat16",), same("model.dtype"), ("dtype", "rollout.dtype")),
    Row(
        ("actor_rollout_ref.model.enable_gradient_checkpointing=true",),
        ("gradient_checkpointing=true",),
        same("learner.activation_checkpointing"),
    ),
    Row((), ("bf16=true",), same("learner.autocast_bf16")),
    Row(("actor_rollout_ref.model.use_remove_padding=true",), (), same("learner.packing")),
    Row(
        ("actor_rollout_ref.model.trust_remote_code=false",),
        ("trust_remote_code=false",),
        say("leave it out: data and models are read as data; no code of theirs is run"),
    ),
    Row(("actor_rollout_ref.model.use_liger=false",), ("use_liger_kernel=false",), NOT_HERE),
    Row(("actor_rollout_ref.model.lora_rank=32",), ("lora_r=32",), same("learner.lora.rank")),
    Row(("actor_rollout_ref.model.lora_alpha=16",), ("lora_alpha=16",), same("learner.lora.alpha")),
    Row(
        ("actor_rollout_ref.model.target_modules=all-linear",),
        ("lora_target_modules=all-linear",),
        _targets,
    ),
    Row((), ("use_rslora=true",), same("learner.lora.rslora")),
    Row(("actor_rollout_ref.model.lora_adapter_path=adapter",), (), same("learner.lora.path")),
    Row((), ("use_peft=true",), switch("here it is learner.lora (docs/lora.md)"), ("lora", "peft_config")),
    Row((), ("lora_dropout=0.05",), say("leave it out: two passes over one sequence must agree")),
    Row((), ("load_in_4bit=true",), NOT_HERE),
    # data
    Row(("data.train_files=gsm8k/train.parquet",), ("dataset_name=gsm8k",), _files("data.train"), ("train_dataset",)),
    Row(("data.val_files=gsm8k/test.parquet",), (), _files("data.eval"), ("eval_dataset", "test_files")),
    Row(("data.prompt_key=prompt",), (), same("data.prompt_field"), ("input_key",)),
    Row(
        ("data.reward_fn_key=data_source",),
        (),
        say("leave it out: a reward function reads any field of the record"),
        ("label_key",),
    ),
    Row(
        ("data.max_prompt_length=512",), ("max_prompt_length=512",), same("data.max_prompt_tokens"), ("prompt_max_len",)
    ),
    Row(
        ("data.filter_overlong_prompts=true",),
        (),
        say("leave it out: prompts above data.max_prompt_tokens are dropped, and counted"),
    ),
    Row(
        ("data.truncation=error",),
        (),
        say("leave it out: prompts above data.max_prompt_tokens are dropped, and counted"),
    ),
    Row((), ("shuffle_dataset=true",), same("data.shuffle")),
    Row(("data.train_batch_size=1024",), (), same(_BATCH), ("gen_batch_size", "rollout_batch_size")),
    Row(("data.val_batch_size=512",), (), say("leave it out: all of data.eval is decoded together")),
    Row((), ("generation_batch_size=128",), _generation_batch),
    # rollouts
    Row(
        ("actor_rollout_ref.rollout.n=8",),
        ("num_generations=8",),
        same("rollout.rollouts_per_prompt"),
        ("n_samples_per_prompt", "group_size"),
    ),
    Row(
        ("data.max_response_length=1024",),
        ("max_completion_length=1024",),
        same("rollout.sampling.max_new_tokens"),
        ("max_new_tokens", "max_tokens", "generate_max_len", "response_length"),
    ),
    Row(("actor_rollout_ref.rollout.temperature=1.0",), ("temperature=1.0",), same("rollout.sampling.temperature")),
    Row(("actor_rollout_ref.rollout.top_p=1.0",), ("top_p=1.0",), same("rollout.sampling.top_p")),
    Row(
        ("actor_rollout_ref.rollout.top_k=-1",),
        ("top_k=0",),
        lambda value, _: f"rollout.sampling.top_k={max(value, 0) if isinstance(value, int) else 0}",
    ),
    Row((), ("min_p=0.1",), NOT_HERE, ("repetition_penalty",)),
    Row((), (), same("rollout.sampling.stop_strings"), ("stop", "stop_words")),
    Row(
        ("actor_rollout_ref.rollout.name=vllm",),
        (),
        words({"vllm": "rollout.engine.backend=vllm"}, "leave it out: rollout.engine.backend is native or vllm"),
    ),
    Row(
        (), ("use_vllm=true",), switch("rollout.engine.backend=vllm", "leave it out: the native engine is the default")
    ),
    Row(
        (),
        ("vllm_mode=colocate",),
        words(
            {"colocate": "cluster.layout=colocated", "server": "cluster.layout=disaggregated"},
            "cluster.layout=colocated",
        ),
    ),
    Row(
        ("actor_rollout_ref.rollout.mode=async",),
        (),
        say("leave it out: requests are sent one by one, and what is done is graded at once"),
    ),
    Row(
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2",),
        ("vllm_tensor_parallel_size=2",),
        same("cluster.gpus_per_worker"),
        ("tp",),
    ),
    Row(
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.4",),
        ("vllm_gpu_memory_utilization=0.4",),
        say("rollout.engine.kv_tokens, in tokens, not a share of the GPU: `paceline plan-step` says how many fit"),
    ),
    Row(
        ("actor_rollout_ref.rollout.max_model_len=2048",),
        ("vllm_max_model_length=2048",),
        same("rollout.engine.max_model_tokens"),
    ),
    Row(("actor_rollout_ref.rollout.max_num_seqs=256",), (), same("rollout.engine.max_running")),
    Row(("actor_rollout_ref.rollout.max_num_batched_tokens=8192",), (), same("rollout.engine.prefill_chunk_tokens")),
    Row(
        ("actor_rollout_ref.rollout.enforce_eager=false",),
        (),
        lambda value, _: f"rollout.engine.cuda_graphs={render(not value)}",
    ),
    Row(
        ("actor_rollout_ref.rollout.free_cache_engine=true",),
        ("vllm_enable_sleep_mode=true",),
        switch("cluster.offload=always", "cluster.offload=never"),
    ),
    Row(
        (
            "actor_rollout_ref.rollout.enable_chunked_prefill=true",
            "actor_rollout_ref.rollout.enable_prefix_caching=true",
        ),
        (),
        ALWAYS,
    ),
    Row(("actor_rollout_ref.rollout.calculate_log_probs=true",), (), ALWAYS),
    Row(
        (),
        (),
        say("rollout.speculation, on by default (docs/speculation.md)"),
        ("num_speculative_tokens", "speculative_config"),
    ),
    Row(
        ("actor_rollout_ref.rollout.multi_turn.enable=true",),
        ("tools=[]",),
        say("environment.tools, or environment.factory for more than tools (docs/turns.md)"),
        ("multi_turn",),
    ),
    Row(
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8",),
        ("max_tool_calling_iterations=8",),
        same("environment.max_turns"),
    ),
)
