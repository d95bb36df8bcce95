"""The model, data and rollouts, by the names of others."""

from typing import Any

from config.model import LORA_TARGETS
from launch.config.foreign_names.answers import (
    ABSENT,
    ALWAYS,
    LEFT,
    MACHINERY,
    NOT_HERE,
    Answer,
    Row,
    Written,
    put,
    same,
    say,
    switch,
    unless,
    words,
)

_BATCH = "rollout.prompts_per_step"
_SPLIT = f"{_BATCH} (prompts) x rollout.rollouts_per_prompt (responses to each)"
_TEMPLATE = f"{ABSENT}: data.chat_template takes a template with them in it"
_TEXT = f"{ABSENT}: prompts are text"


def _generation_batch(value: Any, written: Written) -> str:
    """TRL counts completions, we prompts."""
    group = written.get("num_generations", written.get("rollout.rollouts_per_prompt", 8))
    if isinstance(value, int) and isinstance(group, int) and group > 0 and value % group == 0:
        return put((_BATCH, value // group))
    return f"{_BATCH}: completions / num_generations"


def _sampled_batch(value: Any, written: Written) -> str:
    """DAPO samples more prompts than it trains on: a round of sampling; further ones make up what is missing."""
    if "data.train_batch_size" in written:
        return f"{LEFT}: {_BATCH} are sampled, and rounds make up what is missing (objective.dynamic_sampling)"
    return put((_BATCH, value))


def _files(key: str) -> Answer:
    def answer(value: Any, _: Written) -> str:
        one = value[0] if isinstance(value, list) and len(value) == 1 else value
        return put((key, one)) if isinstance(one, str) else f"{key}: one file, or a folder with all of them"

    return answer


def _adapters(written: Written) -> bool:
    """Whether there are any: verl's rank is 0 unless it is written, TRL's `use_peft` may switch them off."""
    verl = [key for key in ("model.lora_rank", "model.lora.rank") if key in written]
    return all(written[key] for key in verl) and written.get("use_peft") is not False


def _lora(answer: Answer) -> Answer:
    """What makes the section learner.lora: nothing where there are no adapters."""

    def only(value: Any, written: Written) -> str:
        of_verl = any(key.startswith(("model.lora", "model.target_modules")) for key in written)
        if of_verl and not (written.get("model.lora_rank") or written.get("model.lora.rank")):
            return f"{LEFT}: without lora_rank above 0 there are no adapters"
        return answer(value, written) if _adapters(written) else f"{LEFT}: use_peft=false"

    return only


def _targets(value: Any, _: Written) -> str:
    if value == "all-linear":
        return f"{LEFT}: that is how it is here"
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list) or not set(map(str, named)) <= set(LORA_TARGETS):
        return f"learner.lora.targets: some of {', '.join(LORA_TARGETS)}"
    return put(("learner.lora.targets", named))


def _limit(value: Any, _: Written) -> str:
    return put(("data.limit", value)) if isinstance(value, int) and value > 0 else f"{LEFT}: all records are used"


def _parallel(value: Any, written: Written) -> str:
    """Only stock vLLM has more than one GPU for an engine."""
    name = written.get("rollout.name", written.get("rollout.engine.backend"))
    if value == 1 or name in ("vllm", None):
        return put(("cluster.gpus_per_worker", value))
    return "cluster.gpus_per_worker, above 1 with rollout.engine.backend=vllm only"


def _turns(answer: Answer) -> Answer:
    """Of episodes: `environment` is there only where they are switched on; TRL has no switch but its tools."""

    def only(value: Any, written: Written) -> str:
        of_verl = any(key.startswith("rollout.multi_turn.") for key in written)
        if of_verl and not written.get("rollout.multi_turn.enable"):
            return f"{LEFT}: without multi_turn.enable=true a response is one turn"
        return answer(value, written)

    return only


ROWS: tuple[Row, ...] = (
    # the model
    Row(
        ("actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B",),
        ("model_name_or_path=Qwen/Qwen2.5-0.5B",),
        same("model.path"),
        ("pretrain", "model_name"),
    ),
    Row(
        ("actor_rollout_ref.rollout.dtype=bfloat16",),
        ("torch_dtype=bfloat16",),
        words({name: f"model.dtype={name}" for name in ("bfloat16", "float32")}, "model.dtype: bfloat16 or float32"),
        ("dtype",),
    ),
    Row(("actor_rollout_ref.model.tokenizer_path=tokenizer", "data.tokenizer=tokenizer"), (), same("model.tokenizer")),
    Row(("actor_rollout_ref.model.custom_chat_template=template",), (), same("data.chat_template")),
    Row(
        (
            *("actor_rollout_ref.model.use_shm=false", "actor_rollout_ref.model.use_fused_kernels=false"),
            *("actor_rollout_ref.model.fused_kernel_options.*", "actor_rollout_ref.model.tiled_mlp.*"),
        ),
        (),
        MACHINERY,
    ),
    Row(
        (
            *("actor_rollout_ref.model.external_lib=null", "actor_rollout_ref.model.override_config.*"),
            *("actor_rollout_ref.model.override_config={}", "actor_rollout_ref.model.hf_config_path=null"),
            *("actor_rollout_ref.model.exclude_modules=null", "actor_rollout_ref.model.mtp.*"),
            "actor_rollout_ref.model.enable_activation_offload=false",
        ),
        (),
        NOT_HERE,
    ),
    Row(
        ("actor_rollout_ref.model.enable_gradient_checkpointing=true",),
        ("gradient_checkpointing=true",),
        same("learner.activation_checkpointing"),
    ),
    Row((), ("bf16=true",), same("learner.autocast_bf16")),
    Row(
        ("actor_rollout_ref.model.use_remove_padding=true", "actor_rollout_ref.model.use_rmpad=true"),
        (),
        same("learner.packing"),
    ),
    Row(
        ("actor_rollout_ref.model.trust_remote_code=false",),
        ("trust_remote_code=false",),
        say("leave it out: data and models are read as data; no code of theirs is run"),
    ),
    Row(("actor_rollout_ref.model.use_liger=false",), ("use_liger_kernel=false",), NOT_HERE),
    Row(
        ("actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.lora.rank=32"),
        ("lora_r=32", "r=32"),
        _lora(same("learner.lora.rank")),
        ("lora.rank", "lora.r"),
    ),
    Row(
        ("actor_rollout_ref.model.lora_alpha=16", "actor_rollout_ref.model.lora.alpha=16"),
        ("lora_alpha=16",),
        _lora(same("learner.lora.alpha")),
        ("lora.alpha",),
        beside=("actor_rollout_ref.model.lora_rank=32",),
    ),
    Row(
        ("actor_rollout_ref.model.target_modules=all-linear", "actor_rollout_ref.model.lora.target_modules=all-linear"),
        ("lora_target_modules=all-linear",),
        _lora(_targets),
        ("target_modules",),
        beside=("actor_rollout_ref.model.lora_rank=32",),
    ),
    Row((), ("use_rslora=true",), _lora(same("learner.lora.rslora"))),
    Row(
        ("actor_rollout_ref.model.lora_adapter_path=adapter", "actor_rollout_ref.model.lora.adapter_path=adapter"),
        (),
        _lora(same("learner.lora.path")),
        beside=("actor_rollout_ref.model.lora_rank=32",),
    ),
    Row(
        ("actor_rollout_ref.model.lora.*",), (), say(f"{LEFT}: learner.lora has rank, alpha, targets, rslora and path")
    ),
    Row(
        (),
        ("use_peft=true",),
        switch("here it is learner.lora (docs/howto/lora.md)"),
        ("lora", "lora.*", "peft_config"),
    ),
    Row((), ("lora_dropout=0.05",), say(f"{LEFT}: two passes over one sequence must agree")),
    Row((), ("load_in_4bit=true",), unless(), ("load_in_8bit", "use_dora", "lora_modules_to_save")),
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
    Row(("data.seed=1",), (), say(f"{LEFT}: run.seed fixes the order of prompts too")),
    Row(
        ("data.train_max_samples=-1",),
        (),
        _limit,
    ),
    Row(("data.val_max_samples=-1",), (), say("eval.sets: each set has a limit")),
    Row(
        ("data.apply_chat_template_kwargs.*", "data.apply_chat_template_kwargs={}"),
        ("chat_template_kwargs={}",),
        unless(otherwise=_TEMPLATE),
    ),
    Row(
        ("data.image_key=images", "data.video_key=videos", "data.audio_key=audios"),
        (),
        say(_TEXT),
    ),
    Row(
        (
            *("data.image_patch_size=14", "data.return_multi_modal_inputs=true", "data.mm_processor_kwargs.*"),
            "data.mm_processor_kwargs={}",
        ),
        (),
        say(f"{LEFT}: prompts are text"),
    ),
    Row(
        (
            *("data.use_shm=false", "data.return_raw_input_ids=false", "data.return_raw_chat=true"),
            *("data.return_full_prompt=false", "data.dataloader_num_workers=8", "data.validation_shuffle=false"),
            "data.filter_overlong_prompts_workers=1",
        ),
        (),
        MACHINERY,
    ),
    Row(("data.custom_cls.*", "data.sampler.*", "data.datagen.*"), (), NOT_HERE),
    Row(
        ("data.tool_config_path=tools.yaml", "data.function_tool_path=tools.py"),
        (),
        say("environment.tools, functions by name (docs/howto/turns_and_tools.md)"),
    ),
    Row(("data.train_batch_size=1024",), (), same(_BATCH), ("rollout_batch_size",)),
    Row(("data.gen_batch_size=1536",), (), _sampled_batch, ("gen_batch_size",)),
    Row((), (), say(_SPLIT), ("batch_size", "global_batch_size", "train_batch_size", "total_batch_size")),
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
    Row(("actor_rollout_ref.rollout.response_length=1024",), (), same("rollout.sampling.max_new_tokens")),
    Row(("actor_rollout_ref.rollout.prompt_length=512",), (), same("data.max_prompt_tokens")),
    Row(
        ("actor_rollout_ref.rollout.do_sample=true",),
        (),
        switch(f"{LEFT}: that is how it is here", "rollout.sampling.temperature=0"),
    ),
    Row(
        ("actor_rollout_ref.rollout.quantization=fp8",),
        (),
        words({"fp8": "rollout.quantization=fp8"}, "rollout.quantization (docs/quantization.md)"),
    ),
    Row(
        (
            "actor_rollout_ref.rollout.quantization_config_file=null",
            "actor_rollout_ref.rollout.qat=null",
            "actor_rollout_ref.rollout.quantization.*",
        ),
        (),
        unless(otherwise="rollout.quantization (docs/quantization.md)"),
    ),
    Row(("actor_rollout_ref.rollout.temperature=1.0",), ("temperature=1.0",), same("rollout.sampling.temperature")),
    Row(("actor_rollout_ref.rollout.top_p=1.0",), ("top_p=1.0",), same("rollout.sampling.top_p")),
    Row(
        ("actor_rollout_ref.rollout.top_k=-1",),
        ("top_k=0",),
        lambda value, _: put(("rollout.sampling.top_k", max(value, 0) if isinstance(value, int) else 0)),
    ),
    Row((), ("min_p=0.1",), NOT_HERE),
    Row((), ("repetition_penalty=1.0",), unless(1)),
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
        _parallel,
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
        lambda value, _: put(("rollout.engine.cuda_graphs", not value)),
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
        ("actor_rollout_ref.rollout.logprobs_mode=processed_logprobs",),
        (),
        unless("processed_logprobs"),
    ),
    Row(("actor_rollout_ref.rollout.scheduling_policy=fcfs",), (), unless("fcfs")),
    Row(
        (
            "actor_rollout_ref.rollout.expert_parallel_size=1",
            "actor_rollout_ref.rollout.pipeline_model_parallel_size=1",
        ),
        (),
        unless(1),
    ),
    Row(
        (
            *("actor_rollout_ref.rollout.data_parallel_size=1", "actor_rollout_ref.rollout.nnodes=1"),
            "actor_rollout_ref.rollout.n_gpus_per_node=8",
        ),
        (),
        say("rollout.workers, one engine each, of cluster.gpus_per_worker GPUs"),
    ),
    Row(
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.*",),
        (),
        say("rollout.engine.vllm_arguments, with rollout.engine.backend=vllm"),
    ),
    Row(
        (
            *("actor_rollout_ref.rollout.ignore_eos=false", "actor_rollout_ref.rollout.over_sample_rate=0"),
            *("actor_rollout_ref.rollout.engine_kwargs.*", "actor_rollout_ref.rollout.disaggregation.*"),
            *("actor_rollout_ref.rollout.enable_rollout_routing_replay=false", "actor_rollout_ref.rollout.mtp=null"),
            *("actor_rollout_ref.rollout.router_config_path=null", "actor_rollout_ref.rollout.limit_images=null"),
            *("actor_rollout_ref.rollout.full_determinism=false", "actor_rollout_ref.rollout.skip_rollout=false"),
        ),
        (),
        NOT_HERE,
    ),
    Row(
        (
            *("actor_rollout_ref.rollout.load_format=dummy", "actor_rollout_ref.rollout.layered_summon=false"),
            *("actor_rollout_ref.rollout.checkpoint_engine.*", "actor_rollout_ref.rollout.multi_stage_wake_up=false"),
            "actor_rollout_ref.rollout.update_weights_bucket_megabytes=512",
        ),
        (),
        say(f"{LEFT}: engines get the learner's weights, as cluster.weights says"),
    ),
    Row(
        (
            *(
                "actor_rollout_ref.rollout.disable_log_stats=true",
                "actor_rollout_ref.rollout.cudagraph_capture_sizes=null",
            ),
            *("actor_rollout_ref.rollout.skip_tokenizer_init=true", "actor_rollout_ref.rollout.agent.*"),
            *("actor_rollout_ref.rollout.skip.*", "actor_rollout_ref.rollout.skip_dump_dir=dumps"),
            *("actor_rollout_ref.rollout.seed=42", "actor_rollout_ref.rollout.moe_load_balance_metrics_interval=0"),
        ),
        (),
        MACHINERY,
    ),
    Row(
        ("actor_rollout_ref.rollout.prometheus.*", "actor_rollout_ref.rollout.trace.*"),
        (),
        say(f"{LEFT}: docs/howto/observe.md says what is written and served"),
    ),
    Row(
        (),
        (),
        say("rollout.speculation, on by default (docs/speculation.md)"),
        ("num_speculative_tokens", "speculative_config", "speculative_config.*"),
    ),
    Row(
        ("actor_rollout_ref.rollout.multi_turn.enable=true",),
        ("tools=[]",),
        switch("environment.tools, or environment.factory for more than tools (docs/howto/turns_and_tools.md)"),
        ("multi_turn",),
    ),
    Row(
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8",),
        ("max_tool_calling_iterations=8",),
        _turns(same("environment.max_turns")),
        beside=("actor_rollout_ref.rollout.multi_turn.enable=true",),
    ),
    Row(
        ("actor_rollout_ref.rollout.multi_turn.format=hermes",),
        (),
        _turns(words({"hermes": "environment.tool_format=hermes"}, f"{ABSENT}: environment.tool_format is hermes")),
        beside=("actor_rollout_ref.rollout.multi_turn.enable=true",),
    ),
    Row(
        ("actor_rollout_ref.rollout.multi_turn.*",),
        (),
        _turns(say("environment.tools, or environment.factory for more than tools (docs/howto/turns_and_tools.md)")),
    ),
)
