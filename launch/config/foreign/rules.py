"""Answers that need a rule: functions that turn another trainer's value into ours.

Every rule receives the value, all written values, and the further arguments of its row.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from config.model import LORA_TARGETS
from launch.config.foreign.answers import ABSENT, HERE, LEFT, Written, put

_BATCH = "rollout.prompts_per_step"
_CORRECTION = "algorithm.rollout_correction."
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_CLIP = 0.2  # verl's default on both sides
_LEVELS = {
    **{"token": "token", "sequence": "sequence", "geometric": "geometric"},  # verl 0.6
    **{"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"},
}


# Any section.


def at_least_0(value: Any, _: Written, key: str) -> str:
    return put((key, max(value, 0) if isinstance(value, int) else 0))


def negated(value: Any, _: Written, key: str) -> str:
    return put((key, not value))


def every(value: Any, _: Written, key: str) -> str:
    """0 and negative numbers mean never."""
    return put((key, max(value, 0))) if isinstance(value, int) else f"{key}: steps; 0 is never"


def files(value: Any, _: Written, key: str) -> str:
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    return put((key, one)) if isinstance(one, str) else f"{key}: one file, or a folder with all of them"


# Model, data and rollouts.


def generation_batch(value: Any, written: Written) -> str:
    """TRL counts completions, we count prompts."""
    group = written.get("num_generations", written.get("rollout.rollouts_per_prompt", 8))
    if isinstance(value, int) and isinstance(group, int) and group > 0 and value % group == 0:
        return put((_BATCH, value // group))
    return f"{_BATCH}: completions / num_generations"


def device_batch(value: Any, written: Written) -> str:
    """TRL samples `steps_per_generation` times as many completions as fit on all devices at once, by default
    `gradient_accumulation_steps` times. The devices are learner.ranks here."""
    names = ("learner.ranks", "gradient_accumulation_steps", "generation_batch_size")
    devices, accumulated, batch = (written.get(name, 1) for name in names)
    group = written.get("num_generations", 8)
    steps = written.get("steps_per_generation", accumulated)
    if all(isinstance(each, int) and each > 0 for each in (value, devices, group, accumulated, batch, steps)):
        if "generation_batch_size" not in written and value * devices * steps % group == 0:
            return generation_batch(value * devices * steps, written)
        if batch % (value * devices * accumulated) == 0:
            return put(("learner.mini_batches", batch // (value * devices * accumulated)))
    return f"{_BATCH}: per_device_train_batch_size x devices x steps_per_generation / num_generations"


def accumulated(_: Any, written: Written) -> str:
    if "steps_per_generation" in written or "generation_batch_size" in written:
        return f"{LEFT}: it divides learner.mini_batches"
    if "per_device_train_batch_size" in written:
        return f"{LEFT}: it multiplies {_BATCH}"
    return f"{_BATCH}: per_device_train_batch_size (TRL's default: 8) x devices x this / num_generations"


def sampled_batch(value: Any, written: Written) -> str:
    """DAPO samples more prompts than it trains on. Here that is one round of sampling, and further rounds fill the
    rest."""
    if "data.train_batch_size" in written:
        return f"{LEFT}: {_BATCH} are sampled, and further rounds add missing groups (objective.dynamic_sampling)"
    return put((_BATCH, value))


def targets(value: Any, _: Written) -> str:
    if value == "all-linear":
        return f"{LEFT}: {HERE}"
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list) or not set(map(str, named)) <= set(LORA_TARGETS):
        return f"learner.lora.targets: some of {', '.join(LORA_TARGETS)}"
    return put(("learner.lora.targets", named))


def limit(value: Any, _: Written) -> str:
    return put(("data.limit", value)) if isinstance(value, int) and value > 0 else f"{LEFT}: all records are used"


def template_arguments(_: Any, written: Written) -> str:
    """All variables at once: each has a key of its own in `written`."""
    below = ("data.apply_chat_template_kwargs.", "chat_template_kwargs.")
    named: dict[str, Any] = {}
    for key, each in written.items():
        for prefix in below:
            if key.startswith(prefix):
                *path, name = key.removeprefix(prefix).split(".")
                at = named
                for part in path:
                    at = at.setdefault(part, {})
                at[name] = each
    return put(("data.chat_template_kwargs", named))


def parallel(value: Any, _: Written) -> str:
    return put(("cluster.gpus_per_worker", value))


# The objective.


def _loss(written: Written) -> str:
    """Return verl's name of the token loss."""
    if written.get("actor.use_gpg_loss"):
        return "gpg"
    return str(written.get("actor.policy_loss.loss_mode") or "vanilla")


def advantage(value: Any, written: Written) -> str:
    """Answer with baseline and normalization. Adds verl's default ratio bounds if none are written, since
    ours differ."""
    by_std = written.get("algorithm.norm_adv_by_std_in_grpo", True)
    name = str(value).lower().removesuffix("_vectorized")
    pairs = {
        "grpo": ("group", "group" if by_std else "none"),
        "rloo": ("leave_one_out", "none"),
        "reinforce_plus_plus": ("none", "whiten"),
        "reinforce_plus_plus_baseline": ("group", "whiten"),
    }
    if name == "gae":
        return f"{ABSENT}: there is no critic; use adv_estimator=grpo"
    if name not in pairs:
        return ABSENT
    baseline, normalize = pairs[name]
    bounds = [] if _loss(written) == "gpg" or {"actor.clip_ratio", "eps_clip"} & set(written) else ["low", "high"]
    known = {side for side in bounds if f"actor.clip_ratio_{side}" in written or f"eps_clip_{side}" in written}
    clips = [(f"objective.clip_{side}", _CLIP) for side in bounds if side not in known]
    return put(("objective.baseline", baseline), ("objective.normalize", normalize), *clips)


def estimator(value: Any, written: Written) -> str:
    """slime names its advantages, and two losses, by one flag. Those two bring their own bounds of the ratio."""
    if value in ("gspo", "cispo"):
        return put(("objective.name", value))
    if value == "ppo":
        return f"{ABSENT}: there is no critic; use objective.name=grpo"
    return advantage(value, written)


def eps_clip(value: Any, written: Written) -> str:
    """Answer for slime's lower bound, which is the upper one too where that is not written."""
    off = isinstance(value, int | float) and value >= 1
    if off and written.get("advantage_estimator") != "cispo":
        return "objective.clip_low, which is below 1"
    sides = ["low"] if written.get("eps_clip_high") is not None else ["low", "high"]
    return put(*((f"objective.clip_{side}", None if off and side == "low" else value) for side in sides))


def by_std(value: Any, written: Written) -> str:
    if written.get("algorithm.adv_estimator", "grpo") not in ("grpo", "grpo_vectorized"):
        return f"{LEFT}: it belongs to adv_estimator=grpo"
    return put(("objective.normalize", "group" if value else "none"))


def clip(value: Any, written: Written, *sides: str) -> str:
    """`clip_ratio` sets the sides that have no key of their own."""
    if _loss(written) == "gpg":
        return f"{LEFT}: this loss does not clip"
    own = sides if len(sides) == 1 else [s for s in sides if f"actor.clip_ratio_{s}" not in written]
    if not own:
        return f"{LEFT}: clip_ratio_low and clip_ratio_high are set"
    off = isinstance(value, int | float) and value >= 1 and "low" in own
    if off and _loss(written) != "cispo":
        return "objective.clip_low, which is below 1"
    return put(*((f"objective.clip_{side}", None if off and side == "low" else value) for side in own))


def epsilon(value: Any, written: Written) -> str:
    sides = ["low"] if written.get("epsilon_high") is not None else ["low", "high"]
    if written.get("loss_type") == "cispo":
        return put(("objective.clip_low", None))  # TRL bounds the ratio only above
    return put(*((f"objective.clip_{side}", value) for side in sides))


def epsilon_high(value: Any, written: Written) -> str:
    if written.get("loss_type") == "cispo" and isinstance(value, int | float):
        return put(("objective.clip_high", value - 1))  # TRL gives the bound itself, not its distance from 1
    return put(("objective.clip_high", written.get("epsilon", _CLIP) if value is None else value))


def use_kl_loss(value: Any, written: Written) -> str:
    if not value:
        return f"{LEFT}: without objective.kl there is no KL term"
    if written.get("algorithm.use_kl_in_reward"):
        return f"{ABSENT} beside use_kl_in_reward: only one KL term (objective.kl_in)"
    bare = {name: written.get(name) for name in ("kl_loss_type", "kl_loss_coef")}  # slime's
    kind = _KL.get(str(written.get("actor.kl_loss_type") or bare["kl_loss_type"] or "low_var_kl"), "k3")
    coefficient = written.get("actor.kl_loss_coef", bare["kl_loss_coef"] or 0.001)
    return put(("objective.kl", kind), ("objective.kl_in", "loss"), ("objective.kl_coef", coefficient))


def use_kl_in_reward(value: Any, written: Written) -> str:
    coefficient = written.get("algorithm.kl_ctrl.kl_coef", 0.001)
    if not value or not coefficient:
        return f"{LEFT}: rewards have a KL term only with objective.kl_in=reward"
    kind = _KL.get(str(written.get("algorithm.kl_penalty") or "kl"), "k1")
    return put(("objective.kl", kind), ("objective.kl_in", "reward"), ("objective.kl_coef", coefficient))


def part_of(value: Any, written: Written, switch_key: str, key: str) -> str:
    """Answer for the coefficient or kind of a KL term. verl has no such term unless `switch_key` is true."""
    if not (written.get(switch_key) or written.get(switch_key.rpartition(".")[2])):
        return f"{LEFT}: it has no effect in verl without {switch_key}=true; the key here is {key}"
    if key == "objective.kl_coef":
        return put((key, value)) if value else f"{LEFT}: a KL term of weight 0 has no effect"
    kind = _KL.get(str(value).lower())
    return put((key, kind)) if kind else f"objective.kl: k1, k2 or k3; {value} {ABSENT}"


def beta(value: Any, _: Written) -> str:
    if not value or not isinstance(value, int | float):
        return f"{LEFT}: without objective.kl there is no KL term"
    return put(("objective.kl", "k3"), ("objective.kl_in", "loss"), ("objective.kl_coef", value))


def dual(value: Any, written: Written) -> str:
    if _loss(written) != "vanilla":
        return f"{LEFT}: it belongs to the clipped loss"
    return put(("objective.clip_dual", value))


def divisor(value: Any, written: Written) -> str:
    if written.get("actor.loss_agg_mode") != "seq-mean-token-sum-norm":
        return f"{LEFT}: it belongs to loss_agg_mode=seq-mean-token-sum-norm"
    return put(("objective.sum_divisor", value))


def rounds(value: Any, written: Written) -> str:
    """In verl 0 rounds mean as many as it takes."""
    if not written.get("algorithm.filter_groups.enable"):
        return f"{LEFT}: without filter_groups.enable=true no group is replaced"
    most = written.get("algorithm.filter_groups.max_num_gen_batches", 10)
    rounds = most if isinstance(most, int) and most > 0 else 1000
    return put(("objective.dynamic_sampling.max_rounds", rounds))


def overlong(value: Any, written: Written, part: str) -> str:
    """Answer for a part of DAPO's buffer, which counts unless its `enable` is false."""
    found = [key for key in written if key.endswith((f"_cfg.{part}", f"_buffer.{part}"))]
    if any(written.get(key.removesuffix(part) + "enable") is False for key in found):
        return f"{LEFT}: overlong_buffer.enable=false"
    return put((f"objective.overlong.{'buffer_tokens' if part == 'len' else 'penalty'}", value))


def weights(value: Any, _: Written) -> str:
    if value is None:
        return put(("objective.sampler_correction.weights", "none"))
    if value in ("token", "sequence", "geometric"):
        return put(("objective.sampler_correction.weights", value))
    return "objective.sampler_correction.weights: none, token, sequence or geometric"


def truncate(value: Any, written: Written) -> str:
    if not (written.get(f"{_CORRECTION}rollout_is") or written.get("algorithm.rollout_is")):
        return f"{LEFT}: without rollout_is it has no effect"
    if isinstance(value, str) and "_" in value:
        return f"{ABSENT}: weights are truncated, not masked (objective.sampler_correction.mask)"
    return put(("objective.sampler_correction.truncate", float(value)))


def mask(_: Any, written: Written) -> str:
    """Answer with level and bounds of the mask together, since each has its own default in both programs."""
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


def vllm_correction(_: Any, written: Written) -> str:
    """Answer for TRL's four modes: token or sequence ratio, and whether ratios out of bounds are truncated
    or masked."""
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


# Learner and run.


def mini_batches(value: Any, written: Written) -> str:
    """verl counts the prompts of an optimizer step, we count the optimizer steps of an RL step."""
    prompts = written.get("data.train_batch_size", written.get("rollout.prompts_per_step"))
    if isinstance(value, int) and isinstance(prompts, int) and value > 0 and prompts % value == 0:
        return put(("learner.mini_batches", prompts // value))
    return "learner.mini_batches, the optimizer steps of an RL step: rollout.prompts_per_step / ppo_mini_batch_size"


def steps_per_generation(value: Any, written: Written) -> str:
    """TRL counts an RL step's passes; `gradient_accumulation_steps` of them make an optimizer step."""
    passes = written.get("gradient_accumulation_steps", 1)
    if isinstance(value, int) and isinstance(passes, int) and passes > 0 and value > 0 and value % passes == 0:
        return put(("learner.mini_batches", value // passes))
    return "learner.mini_batches: steps_per_generation / gradient_accumulation_steps"


def eval_strategy(value: Any, written: Written) -> str:
    if value == "steps" and isinstance(every := written.get("eval_steps"), int):
        return put(("eval.every", every))
    never = value in ("no", False)
    return put(("eval.every", 0)) if never else "eval.every, in RL steps"


def warmup(value: Any, _: Written) -> str:
    if isinstance(value, int) and value < 0:
        return f"{LEFT}: a negative number means lr_warmup_steps_ratio"
    return put(("learner.optimizer.warmup_steps", value))


def tokens(value: Any, written: Written) -> str:
    if written.get("actor.use_dynamic_bsz") is False:
        return f"{LEFT}: use_dynamic_bsz=false"
    return put(("learner.micro_batch_tokens", value))


def offload(_: Any, written: Written) -> str:
    """One key offloads both the optimizer's state and the KV cache."""
    optimizer = written.get("actor.fsdp_config.optimizer_offload")
    cache = written.get("rollout.free_cache_engine", written.get("vllm_enable_sleep_mode"))
    if optimizer and cache is False:
        return "cluster.offload: always or never, for the optimizer's state and the KV cache at once"
    if optimizer or cache:
        return put(("cluster.offload", "always"))
    return f"{LEFT}: cluster.offload=auto decides by memory" if cache is None else put(("cluster.offload", "never"))


def greedy(value: Any, written: Written) -> str:
    """Sampling of evaluations. verl samples them at `val_kwargs.temperature`, by default 0."""
    if not value:
        return put(("eval.temperature", 0))
    return put(("eval.temperature", written.get("rollout.val_kwargs.temperature", 0)))


def eval_temperature(value: Any, written: Written) -> str:
    return put(("eval.temperature", 0 if written.get("rollout.val_kwargs.do_sample") is False else value))


def name(value: Any, _: Written) -> str:
    return put(("run.name", re.sub(r"[^A-Za-z0-9._-]|^[.-]", "_", str(value))))


def project(value: Any, written: Written) -> str:
    """verl's project name applies to all loggers; here only Weights & Biases has one."""
    names = written.get("trainer.logger", ["wandb"])
    if "wandb" not in names:
        return f"{LEFT}: only W&B has projects, and trainer.logger does not include it"
    return put(("observe.wandb_project", value))


def keep(value: Any, _: Written) -> str:
    return (
        "checkpoint.keep: how many; all are kept with a large number"
        if value is None
        else put(("checkpoint.keep", value))
    )


def wandb(value: Any, _: Written) -> str:
    names = value if isinstance(value, list) else [value]
    if "wandb" in names:
        return "observe.wandb_project, by a name; files, terminal and TensorBoard need none (docs/howto/observe.md)"
    return "leave it out: files, terminal and TensorBoard are written anyway (docs/howto/observe.md)"


# Conditions under which a row counts.


def adapters(written: Written) -> str:
    """Return why the section learner.lora is left out: verl's rank defaults to 0, and TRL's `use_peft` may switch
    adapters off."""
    of_verl = any(key.startswith(("model.lora", "model.target_modules")) for key in written)
    if of_verl and not (written.get("model.lora_rank") or written.get("model.lora.rank")):
        return f"{LEFT}: without lora_rank above 0 there are no adapters"
    ranks = [written[key] for key in ("model.lora_rank", "model.lora.rank") if key in written]
    return "" if all(ranks) and written.get("use_peft") is not False else f"{LEFT}: use_peft=false"


def turns(written: Written) -> str:
    """Return why there is no section environment: verl has a switch, TRL only its tools."""
    of_verl = any(key.startswith("rollout.multi_turn.") for key in written)
    if of_verl and not written.get("rollout.multi_turn.enable"):
        return f"{LEFT}: without multi_turn.enable=true a response is one turn"
    return ""


RULES: Mapping[str, Callable[..., str]] = {
    rule.__name__: rule
    for rule in (
        *(at_least_0, negated, every, files),
        *(generation_batch, device_batch, accumulated, sampled_batch, targets, limit, template_arguments, parallel),
        *(advantage, estimator, by_std, clip, eps_clip, epsilon, epsilon_high),
        *(use_kl_loss, use_kl_in_reward, part_of, beta, dual, divisor),
        *(rounds, overlong, weights, truncate, mask, vllm_correction),
        *(mini_batches, steps_per_generation, eval_strategy, warmup, tokens, offload, greedy, eval_temperature),
        *(name, project, keep, wandb),
    )
}
CONDITIONS: Mapping[str, Callable[[Written], str]] = {"adapters": adapters, "turns": turns}
