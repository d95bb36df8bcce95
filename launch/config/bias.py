"""The biases of a configuration's gradient estimate: from a budget, or from prompts that are skipped.

Owns the reason that concerns staleness; policies own the others.
"""

from config.tree import Config
from policies import rounds
from policies.token_budget import curriculum
from policies.token_budget.bias import biases
from policies.token_budget.skip import BIAS

_STALE = (
    "rollout.staleness: responses are of an older policy, and weights of single tokens, or truncated ones, make up for "
    "that in part (docs/concepts/staleness.md)"
)


def biases_of(config: Config) -> list[str]:
    """Return the reasons in words. Empty if the estimate is unbiased, or if there is no budget."""
    rollout = config.rollout
    found = biases(config.objective, rollout.budget, rollout.abort, config.learner.mini_batches)
    if rollout.staleness and (rollout.budget.on or rollout.abort.enabled):
        found = [*found, _STALE]
    if rollout.rounds.factor is not None:
        found = [*found, rounds.BIAS]
    if rollout.skip.target is not None:
        found = [*found, curriculum.BIAS]
    return found if rollout.skip.after is None else [*found, BIAS]
