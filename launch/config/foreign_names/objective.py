"""The loss and its advantages, by the names of others. verl's `adv_estimator` says the advantage only."""

from typing import Any

from launch.config.foreign_names.answers import (
    ABSENT,
    LEFT,
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

_A = "actor_rollout_ref.actor."
_CORRECTION = "algorithm.rollout_correction."
_NO_CRITIC = f"{LEFT}: there is no critic, and no discount within a response"
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_CLIP = 0.2  # verl's default below and above
_LEVELS = {
    **{"token": "token", "sequence": "sequence", "geometric": "geometric"},  # verl 0.6
    **{"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"},
}


def _loss(written: Written) -> str:
    """verl's name of the loss of a token."""
    if written.get("actor.use_gpg_loss"):
        return "gpg"
    return str(written.get("actor.policy_loss.loss_mode") or "vanilla")


def _advantage(value: Any, written: Written) -> str:
    """Baseline and normalization, and verl's bounds of the ratio where nothing gives others: ours are not its."""
    by_std = written.get("algorithm.norm_adv_by_std_in_grpo", True)
    name = str(value).lower().removesuffix("_vectorized")
    pairs = {
        "grpo": ("group", "group" if by_std else "none"),
        "rloo": ("leave_one_out", "none"),
        "reinforce_plus_plus": ("none", "whiten"),
        "reinforce_plus_plus_baseline": ("group", "whiten"),
    }
    if name == "gae":
        return f"{ABSENT}: there is no critic; adv_estimator=grpo does without"
    if name not in pairs:
        return ABSENT
    baseline, normalize = pairs[name]
    bounds = [] if _loss(written) == "gpg" or "actor.clip_ratio" in written else ["low", "high"]
    clips = [(f"objective.clip_{side}", _CLIP) for side in bounds if f"actor.clip_ratio_{side}" not in written]
    return put(("objective.baseline", baseline), ("objective.normalize", normalize), *clips)


def _by_std(value: Any, written: Written) -> str:
    if written.get("algorithm.adv_estimator", "grpo") not in ("grpo", "grpo_vectorized"):
        return f"{LEFT}: it is of adv_estimator=grpo"
    return put(("objective.normalize", "group" if value else "none"))


def _clip(*sides: str) -> Answer:
    """`clip_ratio` gives the sides that have no key of their own."""

    def answer(value: Any, written: Written) -> str:
        if _loss(written) == "gpg":
            return f"{LEFT}: this loss clips nothing"
        own = sides if len(sides) == 1 else [s for s in sides if f"actor.clip_ratio_{s}" not in written]
        if not own:
            return f"{LEFT}: clip_ratio_low and clip_ratio_high say it"
        off = isinstance(value, int | float) and value >= 1 and "low" in own
        if off and _loss(written) != "cispo":
            return "objective.clip_low, which is below 1"
        return put(*((f"objective.clip_{side}", None if off and side == "low" else value) for side in own))

    return answer


def _epsilon(value: Any, written: Written) -> str:
    sides = ["low"] if written.get("epsilon_high") is not None else ["low", "high"]
    if written.get("loss_type") == "cispo":
        return put(("objective.clip_low", None))  # TRL bounds the ratio above only
    return put(*((f"objective.clip_{side}", value) for side in sides))


def _epsilon_high(value: Any, written: Written) -> str:
    if written.get("loss_type") == "cispo" and isinstance(value, int | float):
        return put(("objective.clip_high", value - 1))  # the bound itself, not its distance from 1
    return put(("objective.clip_high", written.get("epsilon", _CLIP) if value is None else value))


def _use_kl_loss(value: Any, written: Written) -> str:
    if not value:
        return f"{LEFT}: without objective.kl there is no KL term"
    if written.get("algorithm.use_kl_in_reward"):
        return f"{ABSENT} beside use_kl_in_reward: there is one KL term, objective.kl_in says where"
    kind = _KL.get(str(written.get("actor.kl_loss_type") or "low_var_kl"), "k3")
    coefficient = written.get("actor.kl_loss_coef", 0.001)
    return put(("objective.kl", kind), ("objective.kl_in", "loss"), ("objective.kl_coef", coefficient))


def _use_kl_in_reward(value: Any, written: Written) -> str:
    coefficient = written.get("algorithm.kl_ctrl.kl_coef", 0.001)
    if not value or not coefficient:
        return f"{LEFT}: no KL is taken from rewards unless objective.kl_in=reward"
    kind = _KL.get(str(written.get("algorithm.kl_penalty") or "kl"), "k1")
    return put(("objective.kl", kind), ("objective.kl_in", "reward"), ("objective.kl_coef", coefficient))


def _part_of(switch_key: str, key: str) -> Answer:
    """The coefficient or the kind of a KL term that `switch_key` switches on: without it verl has no such term."""

    def answer(value: Any, written: Written) -> str:
        if not written.get(switch_key):
            return f"{LEFT}: without {switch_key}=true it has no effect in verl; here it is {key}"
        if key == "objective.kl_coef":
            return put((key, value)) if value else f"{LEFT}: a KL term of weight 0 is none"
        kind = _KL.get(str(value).lower())
        return put((key, kind)) if kind else f"objective.kl: k1, k2 or k3; {value} {ABSENT}"

    return answer


def _beta(value: Any, _: Written) -> str:
    if not value or not isinstance(value, int | float):
        return f"{LEFT}: without objective.kl there is no KL term"
    return put(("objective.kl", "k3"), ("objective.kl_in", "loss"), ("objective.kl_coef", value))


def _dual(value: Any, written: Written) -> str:
    if _loss(written) != "vanilla":
        return f"{LEFT}: it is of the clipped loss only"
    return put(("objective.clip_dual", value))


def _divisor(value: Any, written: Written) -> str:
    if written.get("actor.loss_agg_mode") != "seq-mean-token-sum-norm":
        return f"{LEFT}: it is of loss_agg_mode=seq-mean-token-sum-norm"
    return put(("objective.sum_divisor", value))


def _rounds(value: Any, written: Written) -> str:
    """verl: 0 rounds are as many as it takes."""
    if not written.get("algorithm.filter_groups.enable"):
        return f"{LEFT}: without filter_groups.enable=true no group is replaced"
    most = written.get("algorithm.filter_groups.max_num_gen_batches", 10)
    rounds = most if isinstance(most, int) and most > 0 else 1000
    return put(("objective.dynamic_sampling.max_rounds", rounds))


def _overlong(name: str) -> Answer:
    """A part of DAPO's buffer, which counts only where `enable` beside it does not switch it off."""

    def answer(value: Any, written: Written) -> str:
        found = [key for key in written if key.endswith((f"_cfg.{name}", f"_buffer.{name}"))]
        if any(written.get(key.removesuffix(name) + "enable") is False for key in found):
            return f"{LEFT}: overlong_buffer.enable=false"
        return put((f"objective.overlong.{'buffer_tokens' if name == 'len' else 'penalty'}", value))

    return answer


def _weights(value: Any, _: Written) -> str:
    if value is None:
        return put(("objective.sampler_correction.weights", "none"))
    if value in ("token", "sequence", "geometric"):
        return put(("objective.sampler_correction.weights", value))
    return "objective.sampler_correction.weights: none, token, sequence or geometric"


def _truncate(value: Any, written: Written) -> str:
    if not (written.get(f"{_CORRECTION}rollout_is") or written.get("algorithm.rollout_is")):
        return f"{LEFT}: without rollout_is it has no effect"
    if isinstance(value, str) and "_" in value:
        return f"{ABSENT}: weights are cut at a bound, not left out beyond it (objective.sampler_correction.mask)"
    return put(("objective.sampler_correction.truncate", float(value)))


def _mask(_: Any, written: Written) -> str:
    """Level and bounds of the mask at once: each has its own default in both programs."""
    option = written.get(f"{_CORRECTION}rollout_rs")
    if option is None:
        return f"{LEFT}: without rollout_rs nothing is masked"
    if (level := _LEVELS.get(str(option))) is None:
        return f"{ABSENT}: objective.sampler_correction.mask is token, sequence or geometric, by the ratio (k1)"
    low, _, high = str(written.get(f"{_CORRECTION}rollout_rs_threshold")).rpartition("_")
    try:
        upper = float(high)
        lower = float(low or written.get(f"{_CORRECTION}rollout_rs_threshold_lower") or 1 / upper)
    except (ValueError, ZeroDivisionError):
        return f"objective.sampler_correction.mask={level}, with low and high"
    key = "objective.sampler_correction."
    return put((f"{key}mask", level), (f"{key}low", round(lower, 12)), (f"{key}high", upper))


def _vllm_correction(_: Any, written: Written) -> str:
    """TRL's four modes: which ratio, and whether what is beyond its bounds is cut or left out."""
    name = "vllm_importance_sampling_"
    if written.get(f"{name}correction") is False:
        return put(("objective.sampler_correction.weights", "none"))
    level, _, way = str(written.get(f"{name}mode", "sequence_mask")).partition("_")
    if level not in ("token", "sequence") or way not in ("mask", "truncate"):
        return "objective.sampler_correction.weights: none, token, sequence or geometric"
    cap = written.get(f"{name}cap")
    high = cap if cap is not None else written.get(f"{name}clip_max", 3.0)
    low, key = written.get(f"{name}clip_min"), "objective.sampler_correction."
    if way == "truncate":
        return put((f"{key}weights", level), (f"{key}truncate", high), (f"{key}floor", low))
    return put((f"{key}weights", level), (f"{key}mask", level), (f"{key}low", low), (f"{key}high", high))


def _aggregation(name: str) -> str:
    return put(("objective.aggregation", name))


ROWS: tuple[Row, ...] = (
    # the objective
    Row(
        ("algorithm.adv_estimator=grpo",),
        (),
        _advantage,
        ("advantage_estimator",),
    ),
    Row((), (), same("objective.name"), ("algorithm", "objective.algorithm")),
    Row(
        (f"{_A}policy_loss.loss_mode=gspo",),
        (),
        words(
            {
                "vanilla": "objective.loss=clip",
                "gspo": "objective.loss=sequence_clip",
                "cispo": "objective.loss=cispo",
                "gpg": "objective.loss=policy_gradient",
            },
            ABSENT,
        ),
        ("loss_mode",),
    ),
    Row((f"{_A}use_gpg_loss=true",), (), switch("objective.loss=policy_gradient")),
    Row((f"{_A}policy_loss.*",), (), say(f"{LEFT}: it is of a loss_mode that {ABSENT}")),
    Row(
        (),
        ("importance_sampling_level=sequence",),
        words({"token": "objective.loss=clip", "sequence": "objective.loss=sequence_clip"}, ABSENT),
    ),
    Row(
        (),
        ("loss_type=dapo",),
        words(
            {
                "grpo": _aggregation("seq_mean_token_mean"),
                "bnpo": _aggregation("token_mean"),
                "dapo": _aggregation("token_mean"),
                "dr_grpo": _aggregation("seq_mean_token_sum_norm"),
                "cispo": put(("objective.loss", "cispo"), ("objective.aggregation", "token_mean")),
            },
            ABSENT,
        ),
    ),
    Row(
        (f"{_A}loss_agg_mode=token-mean",),
        (),
        words(
            {
                name.replace("_", "-"): _aggregation(name)
                for name in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
            },
            "objective.aggregation (docs/learning.md)",
        ),
    ),
    Row(
        (f"{_A}use_token_level_loss=true",),
        (),
        switch(_aggregation("token_mean"), _aggregation("seq_mean_token_mean")),
    ),
    Row(
        (f"{_A}loss_scale_factor=1024",),
        (),
        _divisor,
        beside=(f"{_A}loss_agg_mode=seq-mean-token-sum-norm",),
    ),
    Row(("algorithm.norm_adv_by_std_in_grpo=true",), (), _by_std, ("normalize_std",)),
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
    Row((f"{_A}clip_ratio=0.2",), (), _clip("low", "high"), ("cliprange",)),
    Row((), ("epsilon=0.2",), _epsilon),
    Row((f"{_A}clip_ratio_low=0.2",), (), _clip("low")),
    Row((f"{_A}clip_ratio_high=0.28",), (), _clip("high"), ("seq_clip_ratio_high",)),
    Row((), ("epsilon_high=0.28",), _epsilon_high, null=True),
    Row((f"{_A}clip_ratio_c=3.0",), (), _dual),
    Row((), ("delta=3.0",), same("objective.clip_dual"), null=True),
    Row((), (), same("objective.band_low"), ("neg_seq_clip_ratio_low",)),
    Row((), (), same("objective.band_high"), ("neg_seq_clip_ratio_high",)),
    Row((f"{_A}use_kl_loss=true",), (), _use_kl_loss),
    Row(
        (f"{_A}kl_loss_coef=0.001",),
        (),
        _part_of("actor.use_kl_loss", "objective.kl_coef"),
        beside=(f"{_A}use_kl_loss=true",),
    ),
    Row(
        (f"{_A}kl_loss_type=low_var_kl",),
        (),
        _part_of("actor.use_kl_loss", "objective.kl"),
        beside=(f"{_A}use_kl_loss=true",),
    ),
    Row((), (), same("objective.kl_coef"), ("init_kl_coef",)),
    Row((), ("beta=0.04",), _beta),
    Row(("algorithm.use_kl_in_reward=true",), (), _use_kl_in_reward),
    Row(
        ("algorithm.kl_ctrl.kl_coef=0.001",),
        (),
        _part_of("algorithm.use_kl_in_reward", "objective.kl_coef"),
        beside=("algorithm.use_kl_in_reward=true",),
    ),
    Row(
        ("algorithm.kl_penalty=low_var_kl",),
        (),
        _part_of("algorithm.use_kl_in_reward", "objective.kl"),
        beside=("algorithm.use_kl_in_reward=true",),
    ),
    Row(("algorithm.kl_ctrl.type=fixed",), (), unless("fixed")),
    Row(("algorithm.kl_ctrl.*",), (), say(f"{LEFT}: it is of an adaptive coefficient, which {ABSENT}")),
    Row((f"{_A}entropy_coeff=0.001",), ("entropy_coef=0.001",), same("objective.entropy_coef")),
    Row(
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=10"),
        (),
        _rounds,
        beside=("algorithm.filter_groups.enable=true",),
    ),
    Row((), (), switch("objective.dynamic_sampling.max_rounds=10"), ("filter_groups",)),
    Row(("algorithm.filter_groups.metric=acc",), (), say(f"{LEFT}: groups are told apart by their rewards")),
    Row(("algorithm.filter_groups.*",), (), say(f"{LEFT}: rounds follow one another")),
    Row(
        (
            "reward_model.overlong_buffer.len=4096",
            "reward_model.reward_kwargs.overlong_buffer_cfg.len=4096",
            "reward.reward_kwargs.overlong_buffer_cfg.len=4096",
            "custom_reward_function.overlong_buffer.len=4096",
        ),
        (),
        _overlong("len"),
        ("overlong_buffer",),
    ),
    Row(
        (
            "reward_model.overlong_buffer.penalty_factor=1.0",
            "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
            "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
            "custom_reward_function.overlong_buffer.penalty_factor=1.0",
        ),
        (),
        _overlong("penalty_factor"),
    ),
    Row(
        (
            "reward_model.overlong_buffer.*",
            "reward_model.reward_kwargs.overlong_buffer_cfg.*",
            "reward.reward_kwargs.overlong_buffer_cfg.*",
            "custom_reward_function.overlong_buffer.*",
        ),
        (),
        say(f"{LEFT}: objective.overlong.buffer_tokens above 0 switches it on"),
    ),
    Row(
        ("reward_model.reward_kwargs.max_resp_len=8192", "reward.reward_kwargs.max_resp_len=8192"),
        (),
        say(f"{LEFT}: the limit is rollout.sampling.max_new_tokens"),
    ),
    Row((), ("mask_truncated_completions=true",), same("objective.mask_truncated"), ("overlong_filter",)),
    Row((f"{_CORRECTION}rollout_is=token", "algorithm.rollout_is=token"), (), _weights, null=True),
    Row(
        (f"{_CORRECTION}rollout_is_threshold=2.0", "algorithm.rollout_is_threshold=2.0"),
        (),
        _truncate,
        ("seq_tis_imp_ratio_cap",),
        beside=(f"{_CORRECTION}rollout_is=token",),
    ),
    Row(
        (f"{_CORRECTION}rollout_rs=token_k1", f"{_CORRECTION}rollout_rs_threshold=0.5_2.0"),
        (),
        _mask,
        beside=(f"{_CORRECTION}rollout_rs=token_k1", f"{_CORRECTION}rollout_rs_threshold=0.5_2.0"),
    ),
    Row((f"{_CORRECTION}rollout_rs_threshold_lower=0.5",), (), say(f"{LEFT}: rollout_rs is answered with its bounds")),
    Row((f"{_CORRECTION}loss_type=ppo_clip",), (), unless("ppo_clip")),
    Row((f"{_CORRECTION}*",), (), NOT_HERE),
    Row(
        (),
        (
            "vllm_importance_sampling_correction=true",
            "vllm_importance_sampling_mode=sequence_mask",
            "vllm_importance_sampling_clip_max=3.0",
            "vllm_importance_sampling_clip_min=0.5",
        ),
        _vllm_correction,
        ("vllm_importance_sampling_cap",),
        null=True,
    ),
    Row(
        (f"{_A}ppo_epochs=1",),
        ("num_iterations=1",),
        words(
            {1: f"{LEFT}: that is always so here"},
            f"{ABSENT}: every response is learned from once; see learner.mini_batches",
        ),
    ),
    Row(("algorithm.gamma=1.0", "algorithm.lam=1.0", "trainer.critic_warmup=0"), (), say(_NO_CRITIC), ("critic",)),
    Row(("critic.*",), (), say(f"{LEFT}: there is no critic")),
    Row(("algorithm.use_pf_ppo=false", "algorithm.pf_ppo.*"), (), NOT_HERE),
    Row(("distillation.*",), (), NOT_HERE),
    Row((f"{_A}tau_pos=1.0", f"{_A}tau_neg=1.05"), (), say(f"{LEFT}: it is of loss_mode=sapo, which {ABSENT}")),
    Row((), ("sync_ref_model=true",), unless(), ("ref_model_mixup_alpha", "ref_model_sync_steps")),
)
