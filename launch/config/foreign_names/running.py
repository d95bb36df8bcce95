"""The learner, rewards and the run, by the names of others, and of earlier versions."""

from typing import Any

from launch.config.foreign_names.answers import ABSENT, ALWAYS, Answer, Row, Written, same, say, switch, words

_TERMS = "reward.terms, with name and weight: {kind: python, function: 'module:function'} (docs/rewards.md)"


def _mini_batches(value: Any, written: Written) -> str:
    """verl counts the prompts of an optimizer step, we the optimizer steps of an RL step."""
    prompts = written.get("train_batch_size", written.get("prompts_per_step"))
    if isinstance(value, int) and isinstance(prompts, int) and value > 0 and prompts % value == 0:
        return f"learner.mini_batches={prompts // value}"
    return "learner.mini_batches, the optimizer steps of an RL step: rollout.prompts_per_step / ppo_mini_batch_size"


def _steps_per_generation(value: Any, written: Written) -> str:
    return (
        f"learner.mini_batches={value}"
        if "gradient_accumulation_steps" not in written
        else ("learner.mini_batches: steps_per_generation / gradient_accumulation_steps")
    )


def _every(key: str) -> Answer:
    """0 and negative numbers mean never."""
    return lambda value, _: f"{key}={max(value, 0)}" if isinstance(value, int) else f"{key}: steps; 0 is never"


def _wandb(value: Any, _: Written) -> str:
    names = value if isinstance(value, list) else [value]
    if "wandb" in names:
        return "observe.wandb_project, by a name; files, terminal and TensorBoard need none (docs/observing.md)"
    return "leave it out: files, terminal and TensorBoard are written anyway (docs/observing.md)"


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
        same("learner.optimizer.warmup_steps"),
    ),
    Row(
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",),
        ("warmup_ratio=0.1",),
        say("learner.optimizer.warmup_steps, in optimizer steps: the ratio x run.steps x learner.mini_batches"),
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
        ("warmup_style",),
    ),
    Row(
        ("actor_rollout_ref.actor.optim.weight_decay=0.01",),
        ("weight_decay=0.01",),
        same("learner.optimizer.weight_decay"),
    ),
    Row((), ("adam_beta2=0.99",), say("learner.optimizer.betas, both at once: [0.9, 0.99]"), ("adam_beta1",)),
    Row((), ("optim=adamw_torch",), words({"muon": "learner.optimizer.name=muon"}, "learner.optimizer.name=adamw")),
    Row(("actor_rollout_ref.actor.grad_clip=1.0",), ("max_grad_norm=1.0",), same("learner.optimizer.max_grad_norm")),
    Row(("actor_rollout_ref.actor.ppo_mini_batch_size=256",), (), _mini_batches),
    Row((), ("steps_per_generation=4",), _steps_per_generation, ("num_mini_batches",)),
    Row(
        (),
        ("gradient_accumulation_steps=4",),
        say("leave it out: gradients are summed over a mini-batch, of which an RL step has learner.mini_batches"),
    ),
    Row(
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        ),
        ("per_device_train_batch_size=8",),
        say("learner.micro_batch_tokens, in tokens (default 8192): micro-batches are packed, and change no sum"),
        ("micro_train_batch_size", "ppo_micro_batch_size", "log_prob_micro_batch_size"),
    ),
    Row(("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",), (), same("learner.micro_batch_tokens")),
    Row(("actor_rollout_ref.actor.use_dynamic_bsz=true",), (), ALWAYS),
    Row(
        ("actor_rollout_ref.actor.fsdp_config.param_offload=false",),
        (),
        words({False: "leave it out: weights stay on the GPU"}, ABSENT),
    ),
    Row(
        ("actor_rollout_ref.actor.fsdp_config.optimizer_offload=false",),
        (),
        switch("cluster.offload=always", "cluster.offload=auto"),
    ),
    Row(("actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",), (), words({1: "leave it out"}, ABSENT)),
    Row(
        ("actor_rollout_ref.actor.strategy=fsdp2",),
        ("deepspeed=zero3.json",),
        say("leave it out: the learner is FSDP2, with learner.ranks processes"),
        ("fsdp", "fsdp_size"),
    ),
    # rewards
    Row(
        ("custom_reward_function.path=reward.py",),
        ("reward_funcs=accuracy_reward",),
        say(_TERMS),
        ("reward_fn", "custom_reward_function", "custom_reward_function.name"),
    ),
    Row((), ("reward_weights=[1.0, 0.2]",), say("reward.terms: every term has its own weight")),
    Row(
        ("reward_model.enable=false",),
        (),
        words({False: "leave it out: reward.terms says what grades"}, _TERMS),
        ("reward_model", "reward_manager"),
    ),
    # the run
    Row(("trainer.total_training_steps=100",), ("max_steps=100",), same("run.steps")),
    Row(
        ("trainer.total_epochs=15",),
        ("num_train_epochs=15",),
        say("run.steps, in RL steps: epochs x prompts / rollout.prompts_per_step"),
        ("num_episodes",),
    ),
    Row(("trainer.experiment_name=gsm8k",), ("run_name=gsm8k",), same("run.name")),
    Row(("trainer.default_local_dir=runs",), ("output_dir=runs",), same("run.dir"), ("logging_dir",)),
    Row((), ("seed=42",), same("run.seed")),
    Row(("trainer.save_freq=20",), ("save_steps=20",), _every("checkpoint.every")),
    Row(("trainer.max_actor_ckpt_to_keep=2",), ("save_total_limit=2",), same("checkpoint.keep")),
    Row(("trainer.test_freq=5",), ("eval_steps=5",), _every("eval.every")),
    Row(
        ("trainer.val_before_train=true",),
        (),
        say("leave it out: held-out prompts are evaluated before the first step and after the last"),
    ),
    Row(("actor_rollout_ref.rollout.val_kwargs.n=4",), ("num_generations_eval=4",), same("eval.samples")),
    Row(("actor_rollout_ref.rollout.val_kwargs.temperature=0.6",), (), same("eval.temperature")),
    Row(
        ("actor_rollout_ref.rollout.val_kwargs.do_sample=true",),
        (),
        switch("eval.temperature=1.0", "eval.temperature=0"),
    ),
    Row(
        ("trainer.resume_mode=auto", "trainer.resume_from_path=runs/x"),
        ("resume_from_checkpoint=true",),
        say("no key: paceline train CONFIG --resume, or --resume-or-start"),
    ),
    Row(
        ("trainer.n_gpus_per_node=8", "trainer.nnodes=1"),
        (),
        say(
            "rollout.workers and learner.ranks, in processes: 8 and 8 for eight shared GPUs (cluster.layout=colocated)"
        ),
    ),
    Row(("trainer.project_name=math",), (), same("observe.wandb_project"), ("wandb_project", "wandb", "use_wandb")),
    Row(("trainer.logger=[console, wandb]",), ("report_to=wandb",), _wandb),
    Row(("trainer.log_val_generations=10",), ("num_completions_to_print=10",), same("observe.samples_per_step")),
    Row(
        (),
        ("log_completions=true",),
        say("observe.samples_per_step: how many responses a step writes to samples.jsonl"),
    ),
    Row((), ("logging_steps=1",), say("leave it out: every step is written")),
    Row((), ("push_to_hub=false",), words({False: "leave it out: nothing leaves this machine"}, ABSENT)),
    # what an earlier version had
    Row(
        (),
        (),
        say("windows are measured in bytes now: rollout.speculation.suffix.window_bytes, 10 per token"),
        ("window_rollouts",),
    ),
)
