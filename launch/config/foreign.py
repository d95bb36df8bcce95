"""What other trainers, and earlier versions, call things, and where they are here. Owns the table only; used where a
key is unknown."""

ABSENT = ""  # known elsewhere, not in this version
_NAME = "objective.name"
_ENTROPY, _TRUNCATED = "objective.entropy_coef", "objective.mask_truncated"
_CORRECTION = "objective.sampler_correction"
_LR, _BATCH, _GROUP = "learner.optimizer.lr", "rollout.prompts_per_step", "rollout.rollouts_per_prompt"
_RESPONSE, _PROMPT = "rollout.sampling.max_new_tokens", "data.max_prompt_tokens"
_GPUS, _MICRO, _MINI = "cluster.gpus_per_worker", "learner.micro_batch_tokens", "learner.mini_batches"
_SAVE, _EVAL, _KV = "checkpoint.every", "eval.every", "rollout.engine.kv_tokens"

# The last words of a key of verl, TRL, OpenRLHF or prime-rl -> our key, or what to say. Longer entries win.
NAMES: dict[str, str] = {
    # learning
    "learning_rate": _LR, "actor_learning_rate": _LR, "optim.lr": _LR, "lr": _LR,
    "lr_scheduler_type": "learner.optimizer.schedule", "warmup_ratio": "learner.optimizer.warmup_steps",
    "lr_warmup_steps": "learner.optimizer.warmup_steps", "lr_warmup_steps_ratio": "learner.optimizer.warmup_steps",
    "weight_decay": "learner.optimizer.weight_decay", "max_grad_norm": "learner.optimizer.max_grad_norm",
    "grad_clip": "learner.optimizer.max_grad_norm", "optim": "learner.optimizer.name",
    "bf16": "learner.autocast_bf16", "gradient_checkpointing": "learner.activation_checkpointing",
    "enable_gradient_checkpointing": "learner.activation_checkpointing",
    "gradient_accumulation_steps": _MINI, "num_mini_batches": _MINI, "ppo_mini_batch_size": _MINI,
    "ppo_micro_batch_size": _MICRO, "ppo_micro_batch_size_per_gpu": _MICRO, "ppo_max_token_len_per_gpu": _MICRO,
    "per_device_train_batch_size": _MICRO, "micro_train_batch_size": _MICRO, "use_remove_padding": "learner.packing",
    # objective
    "algorithm": _NAME, "adv_estimator": _NAME, "advantage_estimator": _NAME, "loss_mode": "objective.loss",
    "objective.algorithm": _NAME, "loss_type": "objective.aggregation", "use_kl_in_reward": "objective.kl_in",
    "loss_agg_mode": "objective.aggregation", "clip_ratio": "objective.clip_high", "cliprange": "objective.clip_high",
    "clip_ratio_low": "objective.clip_low", "clip_ratio_high": "objective.clip_high",
    "epsilon_high": "objective.clip_high", "objective.epsilon": "objective.clip_low",
    "beta": "objective.kl_coef", "kl_loss_coef": "objective.kl_coef", "init_kl_coef": "objective.kl_coef",
    "use_kl_loss": "objective.kl", "kl_loss_type": "objective.kl", "kl_penalty": "objective.kl",
    "scale_rewards": "objective.normalize", "norm_adv_by_std_in_grpo": "objective.normalize",
    "normalize_std": "objective.normalize", "filter_groups": "objective.dynamic_sampling", "entropy_coeff": _ENTROPY,
    "entropy_coef": _ENTROPY, "overlong_buffer": "objective.overlong", "mask_truncated_completions": _TRUNCATED,
    "overlong_filter": _TRUNCATED, "clip_ratio_c": "objective.clip_dual", "rollout_is": _CORRECTION,
    "rollout_is_threshold": _CORRECTION, "vllm_importance_sampling_correction": _CORRECTION,
    "seq_clip_ratio_high": "objective.clip_high", "neg_seq_clip_ratio_low": "objective.band_low",
    "neg_seq_clip_ratio_high": "objective.band_high", "seq_tis_imp_ratio_cap": f"{_CORRECTION}.truncate",
    # rollouts
    "num_generations": _GROUP, "n_samples_per_prompt": _GROUP, "rollout.n": _GROUP, "group_size": _GROUP,
    "train_batch_size": _BATCH, "rollout_batch_size": _BATCH, "gen_batch_size": _BATCH,
    "max_completion_length": _RESPONSE, "max_response_length": _RESPONSE, "max_new_tokens": _RESPONSE,
    "max_tokens": _RESPONSE, "generate_max_len": _RESPONSE, "response_length": _RESPONSE,
    "temperature": "rollout.sampling.temperature", "top_p": "rollout.sampling.top_p",
    "stop": "rollout.sampling.stop_strings", "stop_words": "rollout.sampling.stop_strings",
    "top_k": "rollout.sampling.top_k", "max_model_len": "rollout.engine.max_model_tokens",
    "max_num_seqs": "rollout.engine.max_running", "gpu_memory_utilization": _KV, "vllm_gpu_memory_utilization": _KV,
    "use_vllm": "rollout.engine.backend", "rollout.name": "rollout.engine.backend",
    "num_speculative_tokens": "rollout.speculation.strategies", "speculative_config": "rollout.speculation",
    # data and reward
    "max_prompt_length": _PROMPT, "prompt_max_len": _PROMPT, "train_files": "data.train", "val_files": "data.eval",
    "dataset_name": "data.train", "prompt_key": "data.prompt_field", "input_key": "data.prompt_field",
    "label_key": "data.answer_field", "filter_overlong_prompts": _PROMPT, "apply_chat_template": "data.template",
    "reward_funcs": "reward.terms", "reward_weights": "reward.terms", "reward_fn": "reward.terms",
    "custom_reward_function": "reward.terms", "reward_model": "reward.terms",
    # the run
    "model_name_or_path": "model.path", "pretrain": "model.path", "torch_dtype": "model.dtype",
    "output_dir": "run.dir", "run_name": "run.name", "experiment_name": "run.name", "max_steps": "run.steps",
    "total_training_steps": "run.steps", "total_epochs": "run.steps", "num_train_epochs": "run.steps",
    "num_episodes": "run.steps", "seed": "run.seed", "save_freq": _SAVE, "save_steps": _SAVE,
    "save_total_limit": "checkpoint.keep", "test_freq": _EVAL, "eval_steps": _EVAL, "n_gpus_per_node": _GPUS,
    "tensor_model_parallel_size": _GPUS, "vllm_tensor_parallel_size": _GPUS, "tp": _GPUS,
    "project_name": "observe.wandb_project", "report_to": "observe.wandb_project", "wandb": "observe.wandb_project",
    "use_wandb": "observe.wandb_project", "logging_dir": "run.dir",
    # what an earlier version had
    "window_rollouts": "windows are measured in bytes now: rollout.speculation.suffix.window_bytes, 10 per token",
    # what this version has not
    **dict.fromkeys(
        ("lora", "lora_rank", "lora_alpha", "lora_target_modules", "peft_config", "use_peft", "load_in_4bit", "critic",
         "ulysses_sequence_parallel_size", "multi_turn", "tools", "sync_ref_model", "deepspeed", "param_offload",
         "optimizer_offload", "push_to_hub", "num_iterations", "ppo_epochs"),
        ABSENT,
    ),
}  # fmt: skip


def elsewhere(key: str) -> str:
    """The remedy for a key that is another trainer's; empty if it is none that we know."""
    parts = key.split(".")
    for count in (2, 1):
        name = ".".join(parts[-count:])
        if name not in NAMES:
            continue
        ours = NAMES[name]
        if " " in ours:
            return ours
        if ours.rpartition(".")[2] == parts[-1]:
            return f"did you mean {ours}?"
        return f"here it is {ours}" if ours else f"{name} is not in this version"
    return ""
