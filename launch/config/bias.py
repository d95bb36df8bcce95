"""What a configuration's estimate of the gradient is off by, where it has a budget or passes prompts over. Owns the
reason of staleness; policies have the others.
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
    """Reasons in words, for people; none where the estimate is unbiased, or where there is no budget."""
    rollout = config.rollout
    found = biases(config.objective, rollout.budget, rollout.abort, config.learner.mini_batches)
    if rollout.staleness and (rollout.budget.on or rollout.abort.enabled):
        found = [*found, _STALE]
    if rollout.rounds.factor is not None:
        found = [*found, rounds.BIAS]
    if rollout.skip.target is not None:
        found = [*found, curriculum.BIAS]
    return found if rollout.skip.after is None else [*found, BIAS]
