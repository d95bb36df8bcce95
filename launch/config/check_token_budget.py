"""Faults of rollout.budget that one key alone does not show; see launch.config.check."""

import math
from collections.abc import Iterator

from config.token_budget import BudgetOptions
from config.tree import Config
from launch.config.issues import Issue


def budget_issues(c: Config) -> Iterator[Issue]:
    """Sizes that contradict each other, that cannot be kept to, or that would be ignored."""
    key, b, usual = "rollout.budget", c.rollout.budget, c.rollout.rollouts_per_prompt
    if not b.on:
        for name in ("min_rollouts", "max_rollouts"):
            if getattr(b, name) != BudgetOptions.model_fields[name].default:
                yield Issue(
                    f"{key}.{name}", "is set, but there is no budget", remedy=f"set {key}.share, or all of {key}={{}}"
                )
        return
    if b.tokens_per_step is not None and b.share is not None:
        yield Issue(
            f"{key}.share",
            f"{b.share:g}, but {key}.tokens_per_step={b.tokens_per_step} says how large the budget is",
            remedy="leave one of them out",
        )
    elif b.share is not None and b.share * usual < b.min_rollouts * (1 - 1e-9):
        yield Issue(
            f"{key}.share",
            f"{b.share:g} of rollout.rollouts_per_prompt={usual} is {b.share * usual:g} to each prompt, but "
            f"{key}.min_rollouts={b.min_rollouts} of them it gets",
            remedy=f"raise it to {b.min_rollouts / usual:g}, or lower rollout.prompts_per_step instead"
            if b.min_rollouts <= usual
            else f"raise rollout.rollouts_per_prompt to {math.ceil(b.min_rollouts / b.share)}"
            + (f", or lower {key}.min_rollouts" if usual >= BudgetOptions.model_fields["min_rollouts"].default else ""),
        )
    elif b.tokens_per_step is not None and b.tokens_per_step < (least := b.min_rollouts * c.rollout.prompts_per_step):
        yield Issue(
            f"{key}.tokens_per_step",
            f"{b.tokens_per_step}, but {c.rollout.prompts_per_step} prompts get {b.min_rollouts} responses each at "
            f"least, which is {least} of them",
            remedy="raise it, or lower rollout.prompts_per_step",
        )
    each = b.max_rollouts or 4 * usual
    most = c.rollout.prompts_per_step * each * c.rollout.sampling.max_new_tokens
    if b.tokens_per_step is not None and b.tokens_per_step > most:
        yield Issue(
            f"{key}.tokens_per_step",
            f"{b.tokens_per_step}, but an RL step cannot spend more than {most}: every prompt would get "
            f"{each} responses, whatever it needs",
            remedy=f"lower it, or raise {key}.max_rollouts",
        )
    if b.max_rollouts is not None and b.max_rollouts < b.min_rollouts:
        yield Issue(
            f"{key}.max_rollouts",
            f"{b.max_rollouts} is less than {key}.min_rollouts={b.min_rollouts}",
            remedy="raise it, or leave it out",
        )
    elif b.tokens_per_step is not None and each < b.min_rollouts:
        yield Issue(
            f"{key}.min_rollouts",
            f"{b.min_rollouts} is more than one prompt gets at most: 4 x rollout.rollouts_per_prompt = {each}",
            remedy=f"lower it, or write {key}.max_rollouts",
        )
    elif b.max_rollouts is not None and b.share is not None and b.max_rollouts < b.share * usual:
        yield Issue(
            f"{key}.max_rollouts",
            f"{b.max_rollouts} to each prompt is less than the budget: {b.share:g} of {usual}",
            remedy="raise it, or leave it out",
        )
    if c.objective.dynamic_sampling.max_rounds > 1:
        yield Issue(
            "objective.dynamic_sampling.max_rounds",
            f"{c.objective.dynamic_sampling.max_rounds}, but {key} is spent in one round: further ones would be beyond "
            "it",
            remedy=f"set objective.dynamic_sampling.max_rounds=1, or {key}={{}}; a budget gives prompts without signal "
            "the fewest responses by itself",
        )
