"""The learner, rewards and the run, by the names of others, and of earlier versions."""

import re
from typing import Any

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

_MODEL = "reward.terms: a reward model is a class of your own, or {kind: judge} (docs/howto/rewards.md)"
_TERMS = "reward.terms, with name and weight: {kind: python, function: 'module:function'} (docs/howto/rewards.md)"


def _mini_batches(value: Any, written: Written) -> str:
    """verl counts the prompts of an optimizer step, we the optimizer steps of an RL step."""
    prompts = written.get("data.train_batch_size", written.get("rollout.prompts_per_step"))
    if isinstance(value, int) and isinstance(prompts, int) and value > 0 and prompts % value == 0:
        return put(("learner.mini_batches", prompts // value))
    return "learner.mini_batches, the optimizer steps of an RL step: rollout.prompts_per_step / ppo_mini_batch_size"


def _steps_per_generation(value: Any, written: Written) -> str:
    """TRL: an RL step's passes; of them `gradient_accumulation_steps` make an optimizer step."""
    passes = written.get("gradient_accumulation_steps", 1)
    if isinstance(value, int) and isinstance(passes, int) and passes > 0 and value > 0 and value % passes == 0:
        return put(("learner.mini_batches", value // passes))
    return "learner.mini_batches: steps_per_generation / gradient_accumulation_steps"


def _every(key: str) -> Answer:
    """0 and negative numbers mean never."""
    return lambda value, _: put((key, max(value, 0))) if isinstance(value, int) else f"{key}: steps; 0 is never"


def _eval_strategy(value: Any, written: Written) -> str:
    if value == "steps" and isinstance(every := written.get("eval_steps"), int):
        return put(("eval.every", every))
    never = value in ("no", False)
    return put(("eval.every", 0)) if never else "eval.every, in RL steps"


def _warmup(value: Any, _: Written) -> str:
    if isinstance(value, int) and value < 0:
        return f"{LEFT}: a negative number means lr_warmup_steps_ratio"
    return put(("learner.optimizer.warmup_steps", value))


def _warmup_ratio(value: Any, _: Written) -> str:
    if not value:
        return f"{LEFT}: there is no warm-up unless learner.optimizer.warmup_steps says so"
    return "learner.optimizer.warmup_steps, in optimizer steps: the ratio x run.steps x learner.mini_batches"


def _tokens(value: Any, written: Written) -> str:
    if written.get("actor.use_dynamic_bsz") is False:
        return f"{LEFT}: use_dynamic_bsz=false"
    return put(("learner.micro_batch_tokens", value))


def _offload(_: Any, written: Written) -> str:
    """One key for the optimizer's state and the KV cache."""
    optimizer = written.get("actor.fsdp_config.optimizer_offload")
    cache = written.get("rollout.free_cache_engine", written.get("vllm_enable_sleep_mode"))
    if optimizer and cache is False:
        return "cluster.offload: always or never, for the optimizer's state and the KV cache at once"
    if optimizer or cache:
        return put(("cluster.offload", "always"))
    return f"{LEFT}: cluster.offload=auto decides by the memory" if cache is None else put(("cluster.offload", "never"))


def _greedy(value: Any, written: Written) -> str:
    """Of evaluations: verl samples them at `val_kwargs.temperature`, by default 0."""
    if not value:
        return put(("eval.temperature", 0))
    return put(("eval.temperature", written.get("rollout.val_kwargs.temperature", 0)))


def _eval_temperature(value: Any, written: Written) -> str:
    return put(("eval.temperature", 0 if written.get("rollout.val_kwargs.do_sample") is False else value))


def _name(value: Any, _: Written) -> str:
    return put(("run.name", re.sub(r"[^A-Za-z0-9._-]|^[.-]", "_", str(value))))


def _project(value: Any, written: Written) -> str:
    """verl names a project for whatever logs; here only Weights & Biases has one."""
    names = written.get("trainer.logger", ["wandb"])
    if "wandb" not in names:
        return f"{LEFT}: only W&B has projects here, and trainer.logger does not name it"
    return put(("observe.wandb_project", value))


def _keep(value: Any, _: Written) -> str:
    return (
        "checkpoint.keep: how many; all are kept with a large number"
        if value is None
        else put(("checkpoint.keep", value))
    )


def _wandb(value: Any, _: Written) -> str:
    names = value if isinstance(value, list) else [value]
    if "wandb" in names:
        return "observe.wandb_project, by a name; files, terminal and TensorBoard need none (docs/howto/observe.md)"
    return "leave it out: files, terminal and TensorBoard are written anyway (docs/howto/observe.md)"


ROWS: tuple[Row, ...] = (
    # the learner
    Row(
        ("actor_rollout_ref.actor.optim.lr=1e-6",),
        ("learning_rate=1e-6",),
        same("learner.optimizer.lr"),
        ("lr", "actor_learning_rate"),
    ),
    Row(
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=10",),
        ("warmup_steps=10",),
        _warmup,
    ),
    Row(
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",),
        ("warmup_ratio=0.1",),
        _warmup_ratio,
    ),
    Row(
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=constant",),
        ("lr_scheduler_type=constant",),
        words(
            {
                "constant": "learner.optimizer.schedule=constant",
                "constant_with_warmup": "learner.optimizer.schedule=constant",
                "linear": "learner.optimizer.schedule=linear",
            },
            "learner.optimizer.schedule: constant, linear or linear_half",
        ),
        ("actor.optim.warmup_style",),
    ),
    Row(
        ("actor_rollout_ref.actor.optim.weight_decay=0.01",),
        ("weight_decay=0.01",),
        same("learner.optimizer.weight_decay"),
    ),
    Row((), ("adam_beta2=0.99",), say("learner.optimizer.betas, both at once: [0.9, 0.99]"), ("adam_beta1",)),
    Row(("actor_rollout_ref.actor.optim.betas=[0.9, 0.95]",), (), same("learner.optimizer.betas")),
    Row(
        ("actor_rollout_ref.actor.optim.optimizer=AdamW",),
        ("optim=adamw_torch",),
        words(
            {
                "muon": "learner.optimizer.name=muon",
                **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused"), "learner.optimizer.name=adamw"),
            },
            f"{ABSENT}: learner.optimizer.name is adamw or muon",
        ),
    ),
    Row(("actor_rollout_ref.actor.optim.optimizer_impl=torch.optim",), (), unless("torch.optim")),
    Row(("actor_rollout_ref.actor.optim.clip_grad=1.0",), (), same("learner.optimizer.max_grad_norm")),
    Row(("actor_rollout_ref.actor.optim.override_optimizer_config=null",), (), NOT_HERE),
    Row(
        ("actor_rollout_ref.actor.optim.*",),
        (),
        say(f"{LEFT}: learner.optimizer.schedule says how the rate goes on after its warm-up"),
    ),
    Row(("actor_rollout_ref.actor.grad_clip=1.0",), ("max_grad_norm=1.0",), same("learner.optimizer.max_grad_norm")),
    Row(("actor_rollout_ref.actor.ppo_mini_batch_size=256",), (), _mini_batches),
    Row((), ("steps_per_generation=4",), _steps_per_generation),
    Row((), (), same("learner.mini_batches"), ("num_mini_batches",)),
    Row(
        (),
        ("gradient_accumulation_steps=4",),
        say("leave it out: gradients are summed over a mini-batch, of which an RL step has learner.mini_batches"),
    ),
    Row(
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        ),
        ("per_device_train_batch_size=8",),
        say("learner.micro_batch_tokens, in tokens (default 8192): micro-batches are packed, and change no sum"),
        ("micro_train_batch_size", "ppo_micro_batch_size", "log_prob_micro_batch_size"),
    ),
    Row(
        ("actor_rollout_ref.actor.ppo_micro_batch_size=8", "actor_rollout_ref.rollout.log_prob_micro_batch_size=16"),
        (),
        say("learner.micro_batch_tokens, in tokens (default 8192): micro-batches are packed, and change no sum"),
    ),
    Row(("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",), (), _tokens),
    Row(
        ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384",),
        (),
        say(f"{LEFT}: learner.micro_batch_tokens is of all passes"),
    ),
    Row(
        ("actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true"),
        (),
        ALWAYS,
    ),
    Row(
        ("actor_rollout_ref.actor.fsdp_config.param_offload=false",),
        (),
        words({False: "leave it out: weights stay on the GPU"}, ABSENT),
    ),
    Row(
        ("actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",),
        (),
        _offload,
    ),
    Row(
        ("actor_rollout_ref.rollout.free_cache_engine=true",),
        ("vllm_enable_sleep_mode=true",),
        _offload,
    ),
    Row(
        (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
            "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1",
        ),
        (),
        unless(1),
    ),
    Row(
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",),
        (),
        words(
            {"bf16": "model.dtype=bfloat16", "bfloat16": "model.dtype=bfloat16"},
            f"{LEFT}: model.dtype is float32 unless it says otherwise",
        ),
    ),
    Row(
        ("actor_rollout_ref.actor.fsdp_config.qat.enable=false", "actor_rollout_ref.actor.qat.enable=false"),
        (),
        switch("rollout.quantization, which the learner mirrors (docs/quantization.md)"),
    ),
    Row(
        ("actor_rollout_ref.actor.qat.*", "actor_rollout_ref.actor.fsdp_config.qat.*"),
        (),
        say(f"{LEFT}: rollout.quantization says the format (docs/quantization.md)"),
    ),
    Row(
        ("actor_rollout_ref.actor.fsdp_config.*",),
        (),
        say(f"{LEFT}: the learner is FSDP2, with learner.ranks processes"),
        ("fsdp_config",),
    ),
    Row(("*.megatron.*",), (), say(f"{ABSENT}: the learner is FSDP2, with learner.ranks processes")),
    Row(
        ("actor_rollout_ref.actor.checkpoint.*",),
        (),
        say(f"{LEFT}: a checkpoint has what a resume needs, and the model"),
    ),
    Row(
        (
            "actor_rollout_ref.actor.shuffle=false",
            "actor_rollout_ref.actor.use_torch_compile=true",
            "actor_rollout_ref.actor.data_loader_seed=42",
            "actor_rollout_ref.actor.calculate_entropy=false",
            "actor_rollout_ref.actor.entropy_checkpointing=false",
            "actor_rollout_ref.actor.entropy_from_logits_with_chunking=false",
            "actor_rollout_ref.actor.entropy_from_logits_chunk_size=2048",
            "actor_rollout_ref.actor.pad_to_length=false",
            "actor_rollout_ref.actor.use_fused_kernels=false",
            "actor_rollout_ref.actor.rollout_n=8",
        ),
        (),
        MACHINERY,
    ),
    Row(("actor_rollout_ref.actor.use_remove_padding=true",), (), same("learner.packing")),
    Row(
        (
            "actor_rollout_ref.actor.freeze_vision_tower=false",
            "actor_rollout_ref.actor.use_prefix_grouper=false",
            "actor_rollout_ref.actor.calculate_sum_pi_squared=false",
            "actor_rollout_ref.actor.sum_pi_squared_checkpointing=false",
            "actor_rollout_ref.actor.router_replay.*",
        ),
        (),
        NOT_HERE,
    ),
    Row(
        ("actor_rollout_ref.ref.*",),
        (),
        say(f"{LEFT}: the reference is the model before training, and the learner computes it"),
        ("ref_model",),
    ),
    Row(("actor_rollout_ref.hybrid_engine=true",), (), say(f"{LEFT}: cluster.layout says who shares GPUs")),
    Row(("actor_rollout_ref.nccl_timeout=600",), (), say(f"{LEFT}: learner.timeout_s bounds what the learner does")),
    Row(
        ("actor_rollout_ref.actor.strategy=fsdp2",),
        ("deepspeed=zero3.json",),
        say("leave it out: the learner is FSDP2, with learner.ranks processes"),
        ("fsdp", "fsdp_size"),
    ),
    # rewards
    Row(
        (
            "custom_reward_function.path=reward.py",
            "custom_reward_function.*",
            "reward.custom_reward_function.*",
        ),
        ("reward_funcs=accuracy_reward",),
        say(_TERMS),
        ("reward_fn", "custom_reward_function"),
    ),
    Row((), ("reward_weights=[1.0, 0.2]",), say("reward.terms: every term has its own weight")),
    Row(
        ("reward_model.enable=false", "reward.reward_model.enable=false"),
        (),
        words({False: f"{LEFT}: reward.terms says what grades"}, _MODEL),
    ),
    Row(("reward_model.*", "reward.reward_model.*"), (), say(_MODEL), ("reward_model",)),
    Row(
        ("reward_model.reward_manager=naive", "reward.reward_manager.*"),
        (),
        say(_TERMS),
        ("reward_manager",),
    ),
    Row(
        ("reward_model.reward_kwargs.*", "reward.reward_kwargs.*"),
        (),
        say("reward.terms: `arguments` are of a term (docs/howto/rewards.md)"),
    ),
    Row(("reward.num_workers=8",), (), same("reward.workers")),
    Row(
        ("reward_model.launch_reward_fn_async=false",),
        (),
        say(f"{LEFT}: grading overlaps sampling, in processes of its own"),
    ),
    Row(
        ("sandbox_fusion.*", "reward.sandbox_fusion.*", "reward_model.sandbox_fusion.*"),
        (),
        say("reward.terms with {kind: code}: programs run in a sandbox of our own (docs/howto/rewards.md)"),
    ),
    # the run
    Row(("trainer.total_training_steps=100",), ("max_steps=100",), same("run.steps")),
    Row(
        ("trainer.total_epochs=15",),
        ("num_train_epochs=15",),
        say("run.steps, in RL steps: epochs x prompts / rollout.prompts_per_step"),
        ("num_episodes",),
    ),
    Row(("trainer.experiment_name=gsm8k",), ("run_name=gsm8k",), _name),
    Row(("trainer.default_local_dir=runs",), ("output_dir=runs",), same("run.dir"), ("logging_dir",)),
    Row((), ("seed=42",), same("run.seed")),
    Row(("trainer.save_freq=20",), ("save_steps=20",), _every("checkpoint.every")),
    Row(("trainer.max_actor_ckpt_to_keep=2",), ("save_total_limit=2",), _keep, null=True),
    Row(("trainer.test_freq=5",), ("eval_steps=5",), _every("eval.every")),
    Row((), ("eval_strategy=steps",), _eval_strategy, beside=("eval_steps=5",)),
    Row(
        ("trainer.val_before_train=true",),
        (),
        say("leave it out: held-out prompts are evaluated before the first step and after the last"),
    ),
    Row(("actor_rollout_ref.rollout.val_kwargs.n=4",), ("num_generations_eval=4",), same("eval.samples")),
    Row(("actor_rollout_ref.rollout.val_kwargs.temperature=0.6",), (), _eval_temperature),
    Row(
        ("actor_rollout_ref.rollout.val_kwargs.do_sample=true",),
        (),
        _greedy,
        beside=("actor_rollout_ref.rollout.val_kwargs.temperature=0.6",),
    ),
    Row(("actor_rollout_ref.rollout.val_kwargs.top_p=0.7",), (), same("eval.top_p")),
    Row(
        ("actor_rollout_ref.rollout.val_kwargs.top_k=-1",),
        (),
        lambda value, _: put(("eval.top_k", max(value, 0) if isinstance(value, int) else 0)),
    ),
    Row(("actor_rollout_ref.rollout.val_kwargs.*",), (), say("the section eval says how held-out prompts are sampled")),
    Row(
        ("trainer.resume_mode=auto", "trainer.resume_from_path=runs/x"),
        ("resume_from_checkpoint=true",),
        say("no key: paceline train CONFIG --resume [--step N], or --resume-or-start"),
    ),
    Row(
        ("trainer.n_gpus_per_node=8", "trainer.nnodes=1"),
        (),
        say(
            "rollout.workers and learner.ranks, in processes: 8 and 8 for eight shared GPUs (cluster.layout=colocated)"
        ),
    ),
    Row(("trainer.project_name=math",), (), _project),
    Row((), (), same("observe.wandb_project"), ("wandb_project", "wandb", "use_wandb")),
    Row(("trainer.val_only=false",), (), switch("no key: paceline eval CONFIG")),
    Row(("trainer.device=cuda",), (), say(f"{LEFT}: rollout.engine.device and learner.device say where")),
    Row(
        ("trainer.rollout_data_dir=dumps", "trainer.validation_data_dir=dumps"),
        (),
        say(f"{LEFT}: samples.jsonl and eval_samples.jsonl of the run have responses (observe.samples_per_step)"),
    ),
    Row(
        (
            *("trainer.balance_batch=true", "trainer.esi_redundant_time=0", "trainer.del_local_ckpt_after_load=false"),
            *("trainer.max_critic_ckpt_to_keep=2", "trainer.ray_wait_register_center_timeout=300"),
            *("trainer.use_legacy_worker_impl=auto", "trainer.use_v1=true", "trainer.v1.*", "transfer_queue.*"),
            *("ray_kwargs.*", "ray_init.*", "skip.*", "hydra.*"),
        ),
        (),
        MACHINERY,
    ),
    Row(("trainer.default_hdfs_dir=null", "trainer.checkpoint_callback_class=null"), (), NOT_HERE),
    Row(
        (
            *(
                "*.profiler.*",
                "actor_rollout_ref.profiler.*",
                "global_profiler.*",
                "trainer.npu_profile.*",
                "trainer.profile_steps=null",
            ),
            *("trainer.controller_nsight_options.*", "trainer.worker_nsight_options.*"),
        ),
        (),
        say(f"{LEFT}: every step's timeline is written (docs/howto/observe.md)"),
    ),
    Row(("trainer.logger=[console, wandb]",), ("report_to=wandb",), _wandb),
    Row(("trainer.log_val_generations=10",), ("num_completions_to_print=10",), same("observe.samples_per_step")),
    Row(
        (),
        ("log_completions=true",),
        say("observe.samples_per_step: how many responses a step writes to samples.jsonl"),
    ),
    Row((), ("logging_steps=1",), say("leave it out: every step is written")),
    Row((), ("fp16=false",), unless(otherwise=f"{ABSENT}: learner.autocast_bf16, or model.dtype=bfloat16")),
    Row(
        (),
        ("remove_unused_columns=false",),
        say(f"{LEFT}: a reward function reads any field of the record"),
    ),
    Row(
        (),
        (),
        say(f"{LEFT}: a run has one YAML file, the first argument of the command, and overrides"),
        ("config-path", "config-name", "config_path", "config_name"),
    ),
    Row((), ("push_to_hub=false",), words({False: "leave it out: nothing leaves this machine"}, ABSENT)),
    # what an earlier version had
    Row(
        (),
        (),
        say("windows are measured in bytes now: rollout.speculation.suffix.window_bytes, 10 per token"),
        ("window_rollouts",),
    ),
)
