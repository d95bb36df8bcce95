"""The loss and its advantages, by the names of others."""

from typing import Any

from launch.config.foreign_names.answers import ABSENT, NOT_HERE, Row, Written, same, say, switch, words
from launch.config.schema import render


def _kl(value: Any, _: Written) -> str:
    off = not value or not isinstance(value, int | float)
    return (
        "leave it out: without objective.kl there is no KL term"
        if off
        else (f"objective.kl=k3 objective.kl_coef={render(value)}")
    )


def _loss_type(value: Any, _: Written) -> str:
    return {
        "grpo": "objective.aggregation=seq_mean_token_mean",
        "bnpo": "objective.aggregation=token_mean",
        "dapo": "objective.aggregation=token_mean",
        "dr_grpo": "objective.name=dr_grpo",
        "cispo": "objective.name=cispo",
    }.get(str(value), "objective.aggregation or objective.name (docs/learning.md)")


ROWS: tuple[Row, ...] = (
    # the objective
    Row(
        ("algorithm.adv_estimator=grpo",),
        (),
        words(
            {
                "grpo": "objective.name=grpo",
                "rloo": "objective.name=rloo",
                "gae": "is not in this version: there is no critic; objective.name=grpo does without",
                "reinforce_plus_plus": "objective.name=reinforce_pp",
                "reinforce_plus_plus_baseline": "objective.name=reinforce_pp_baseline",
                "grpo_passk": ABSENT,
                "remax": ABSENT,
            },
            "objective.name (docs/learning.md)",
        ),
        ("advantage_estimator",),
    ),
    Row((), (), same("objective.name"), ("algorithm", "objective.algorithm")),
    Row(
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo",),
        ("importance_sampling_level=sequence",),
        words(
            {
                "vanilla": "objective.loss=clip",
                "gspo": "objective.loss=sequence_clip",
                "cispo": "objective.loss=cispo",
                "token": "objective.loss=clip",
                "sequence": "objective.loss=sequence_clip",
            },
            "objective.loss (docs/learning.md)",
        ),
        ("loss_mode",),
    ),
    Row((), ("loss_type=dapo",), _loss_type),
    Row(
        ("actor_rollout_ref.actor.loss_agg_mode=token-mean",),
        (),
        words(
            {
                name.replace("_", "-"): f"objective.aggregation={name}"
                for name in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
            },
            "objective.aggregation (docs/learning.md)",
        ),
    ),
    Row(
        ("algorithm.norm_adv_by_std_in_grpo=true",),
        (),
        switch("objective.normalize=group", "objective.normalize=none"),
        ("normalize_std",),
    ),
    Row(
        (),
        ("scale_rewards=group",),
        words(
            {
                True: "objective.normalize=group",
                "group": "objective.normalize=group",
                "batch": "objective.normalize=batch",
                False: "objective.normalize=none",
                "none": "objective.normalize=none",
            },
            "objective.normalize: group, batch or none",
        ),
    ),
    Row(
        ("actor_rollout_ref.actor.clip_ratio=0.2",),
        ("epsilon=0.2",),
        same("objective.clip_low", "objective.clip_high"),
        ("cliprange",),
    ),
    Row(("actor_rollout_ref.actor.clip_ratio_low=0.2",), (), same("objective.clip_low")),
    Row(
        ("actor_rollout_ref.actor.clip_ratio_high=0.28",),
        ("epsilon_high=0.28",),
        same("objective.clip_high"),
        ("seq_clip_ratio_high",),
    ),
    Row(("actor_rollout_ref.actor.clip_ratio_c=3.0",), ("delta=3.0",), same("objective.clip_dual")),
    Row((), (), same("objective.band_low"), ("neg_seq_clip_ratio_low",)),
    Row((), (), same("objective.band_high"), ("neg_seq_clip_ratio_high",)),
    Row(
        ("actor_rollout_ref.actor.use_kl_loss=true",),
        (),
        switch("objective.kl=k3", "leave it out: without objective.kl there is no KL term"),
    ),
    Row(
        ("actor_rollout_ref.actor.kl_loss_coef=0.001", "algorithm.kl_ctrl.kl_coef=0.001"),
        (),
        same("objective.kl_coef"),
        ("init_kl_coef",),
    ),
    Row((), ("beta=0.04",), _kl),
    Row(
        ("actor_rollout_ref.actor.kl_loss_type=low_var_kl", "algorithm.kl_penalty=low_var_kl"),
        (),
        words(
            {
                "kl": "objective.kl=k1",
                "k1": "objective.kl=k1",
                "mse": "objective.kl=k2",
                "k2": "objective.kl=k2",
                "low_var_kl": "objective.kl=k3",
                "k3": "objective.kl=k3",
            },
            "objective.kl: k1, k2 or k3",
        ),
    ),
    Row(
        ("algorithm.use_kl_in_reward=true",),
        (),
        switch("objective.kl_in=reward", "leave it out: objective.kl is a term of the loss"),
    ),
    Row(("actor_rollout_ref.actor.entropy_coeff=0.001",), (), same("objective.entropy_coef"), ("entropy_coef",)),
    Row(
        ("algorithm.filter_groups.enable=true",),
        (),
        switch("objective.dynamic_sampling.max_rounds=10"),
        ("filter_groups",),
    ),
    Row(("algorithm.filter_groups.max_num_gen_batches=10",), (), same("objective.dynamic_sampling.max_rounds")),
    Row(("algorithm.filter_groups.metric=acc",), (), say("leave it out: groups are told apart by their rewards")),
    Row(("reward_model.overlong_buffer.len=4096",), (), same("objective.overlong.buffer_tokens"), ("overlong_buffer",)),
    Row(("reward_model.overlong_buffer.penalty_factor=1.0",), (), same("objective.overlong.penalty")),
    Row((), ("mask_truncated_completions=true",), same("objective.mask_truncated"), ("overlong_filter",)),
    Row(
        ("algorithm.rollout_is=token",),
        (),
        words(
            {name: f"objective.sampler_correction.weights={name}" for name in ("token", "sequence", "geometric")},
            "objective.sampler_correction.weights: none, token, sequence or geometric",
        ),
    ),
    Row(
        ("algorithm.rollout_is_threshold=2.0",),
        ("vllm_importance_sampling_cap=2.0",),
        same("objective.sampler_correction.truncate"),
        ("seq_tis_imp_ratio_cap",),
    ),
    Row(
        (),
        ("vllm_importance_sampling_correction=true",),
        switch("objective.sampler_correction.weights=token", "objective.sampler_correction.weights=none"),
    ),
    Row(
        ("actor_rollout_ref.actor.ppo_epochs=1",),
        ("num_iterations=1",),
        words(
            {1: "leave it out: that is always so here"},
            f"{ABSENT}: every response is learned from once; see learner.mini_batches",
        ),
    ),
    Row(
        ("algorithm.gamma=1.0", "algorithm.lam=1.0", "trainer.critic_warmup=0"),
        (),
        say("leave it out: there is no critic, and no discount within a response"),
        ("critic",),
    ),
    Row((), ("sync_ref_model=true",), NOT_HERE),
)
