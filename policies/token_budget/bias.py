"""Reasons why an RL step's expected gradient differs from that without a budget. Owns the reasons and their words.

Without a budget every prompt has as many responses, and none is ended early or given up. Measures nothing.
docs/results/gradient_bias.md has the size of each bias, docs/concepts/learning.md the unbiased settings.
"""

from collections.abc import Iterator

from config.objective import ObjectiveOptions
from config.token_budget import AbortOptions, BudgetOptions


def biases(objective: ObjectiveOptions, budget: BudgetOptions, abort: AbortOptions, mini_batches: int) -> list[str]:
    """Return the reasons, each beginning with its key. Empty without budget and abort, and for objective duet.
    Off-policiness of mini-batches after a step's first is not among them, since it exists without a budget too.

    They concern the gradient of the loss, before norm clipping and the optimizer, if a response's reward depends on its
    answer only. Source of the exact statements: DUET, theorem 3 and its remarks.
    """
    if not (budget.on or abort.enabled):
        return []
    found = (_advantages(objective, budget, abort), _normaliser(objective, abort, mini_batches))
    return [reason for part in (*found, _terms(objective, abort)) for reason in part]


def _advantages(objective: ObjectiveOptions, budget: BudgetOptions, abort: AbortOptions) -> Iterator[str]:
    baseline, normalize = objective.baseline, objective.normalize
    if normalize == "group":
        if budget.on:
            yield (
                "objective.normalize=group: the std of few rewards is often 0, so a prompt counts by how many "
                "responses it got (solved 1 in 10 times, beside 8 responses: .32 with 2, 1.42 with 32)"
            )
        if abort.enabled:
            yield "objective.normalize=group: the std is also of responses that were given up, so it follows the coins"
    elif normalize in ("batch", "whiten"):
        yield (
            f"objective.normalize={normalize}: the std of the batch follows "
            + ("which prompts got how many responses" if budget.on else "which responses were given up")
            + (": steps are scaled by it" if normalize == "batch" else ", and so does the mean that is subtracted")
        )
    if baseline == "group" and budget.on and normalize != "group":
        yield (
            "objective.baseline=group: a response's own reward is in its baseline, so a prompt with n of them counts "
            "(n - 1) / n (with 2: .57 of what it counts with 8)"
        )
    if baseline in ("batch", "none") and objective.drop_zero_variance:
        yield (
            f"objective.drop_zero_variance with baseline {baseline}: groups of equal rewards would teach, and are the "
            "more frequent the fewer responses they have"
        )
    if objective.length_penalty > 0:
        yield "objective.length_penalty: lengths are compared within a prompt's responses, few or many"
    if objective.dynamic_sampling.max_rounds > 1:
        yield "objective.dynamic_sampling.max_rounds: groups are chosen by the rewards that they are learned from"


def _normaliser(objective: ObjectiveOptions, abort: AbortOptions, mini_batches: int) -> Iterator[str]:
    """Yield the biases of aggregations that divide by a sum over what is trained on."""
    how = objective.aggregation
    if how == "fixed_mean_token_sum_norm":
        return
    dropped = objective.drop_zero_variance and not (objective.teaches_without_advantage or objective.kl_in_reward)
    if how == "token_mean":
        yield "objective.aggregation=token_mean: the loss is divided by the weighted tokens that were learned from"
    elif abort.enabled or dropped or mini_batches > 1:
        yield (
            f"objective.aggregation={how}: the loss is divided by the weights of what is learned from, which follow "
            + ("the coins" if abort.enabled else "the groups that are dropped" if dropped else "the mini-batch")
        )
    if abort.enabled and how in ("token_mean", "seq_mean_token_mean"):
        yield f"objective.aggregation={how}: tokens count by a length that is the shorter for ending with the answer"


def _terms(objective: ObjectiveOptions, abort: AbortOptions) -> Iterator[str]:
    if abort.enabled:
        terms = {"kl": objective.kl != "none" and objective.kl_coef > 0, "entropy_coef": objective.entropy_coef > 0}
        for key in (key for key, on in terms.items() if on):
            yield f"objective.{key}: no token has this term that would have come after the answer"
