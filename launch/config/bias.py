"""What a configuration's estimate of the gradient is off by because of its budget. Owns no reason: policies do."""

from launch.config.tree import Config
from policies.token_budget.bias import biases
from policies.token_budget.skip import BIAS


def biases_of(config: Config) -> list[str]:
    """Reasons in words, for people; none where the estimate is unbiased, or where there is no budget."""
    rollout = config.rollout
    found = biases(config.objective, rollout.budget, rollout.abort, config.learner.mini_batches)
    return found if rollout.skip.after is None else [*found, BIAS]
