"""The spread of responses to one prompt: what one response adds to the variance of the gradient estimate.

Estimated from rewards and lengths. Owns the estimate of one visit and the statistics over visits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Best within a hundredth of the variance, over all kinds of prompts tried: docs/results/allocation.md.
PRIOR = 4.0  # responses' worth of evidence (degrees of freedom) of the pool, for each prompt
RETAINED = 0.5  # of a prompt's evidence at its next visit, since the target model has changed
POOL_VISITS = 512  # about the number of newest visits that the pool averages


def squares(rewards: Sequence[float], sizes: Sequence[float] | Floats | None = None) -> Floats:
    """Return [n]: the square of each response's contribution, (n - 1) / n * (its reward - mean of the others)^2 * its
    size. n >= 2.

    `sizes`: the mean square of a response's score in any unit, which the loss decides. If all are 1, the mean of the
    squares is the unbiased variance of the rewards. A sum over tokens has about its number of tokens, since scores of
    tokens are uncorrelated (docs/results/allocation.md). DUET uses the rewards alone, as if all scores had one size
    (section 3.1).
    """
    values = np.asarray(rewards, dtype=np.float64)
    n = values.size
    apart = (values - values.mean()) * (n / (n - 1))  # distance from the mean of the others
    return np.asarray((n - 1) / n * apart**2 * (1.0 if sizes is None else np.asarray(sizes, dtype=np.float64)))


def visit_variance(contributed: Sequence[float] | Floats, propensities: Sequence[float] | None = None) -> float:
    """Return the mean of `squares`, each divided by its propensity.

    `propensities`: probability that a response like this one is trained on, with weight 1 / propensity
    (contracts.rollout.Rollout). Where a coin decides, both of its outcomes count for what late ones contribute, as
    policies.token_budget.keep.LateModel stores it. So the result is the spread of the actual sum, including the
    surcharge, and less noisy than the kept ones alone.
    """
    weights = 1.0 if propensities is None else 1.0 / np.asarray(propensities, dtype=np.float64)
    return float((np.asarray(contributed) * weights).mean())


@dataclass(frozen=True, slots=True)
class _Evidence:
    degrees: float  # n - 1 of each visit, aged
    squares: float  # (n - 1) * its variance, aged in the same way


class SpreadModel:
    """spread^2 = (PRIOR * pool + squares) / (PRIOR + degrees). A visit of n responses with variance v adds n - 1 to the
    prompt's degrees and (n - 1) * v to its squares, after multiplying both by RETAINED.

    The pool is the same for all prompts: an exponential mean of v over visits, each counting once, so that prompts with
    many responses do not dominate it. One formula thus gives the start (the pool, if nothing is known), a floor (never
    0 once any group has varied) and forgetting (an always solved prompt returns toward the pool while it gets few
    responses). It estimates the mean of spread^2 given what is known, so allocating by it gives the counts of least
    expected variance. The paper has a running mean of all visits instead and, for new prompts, the 5th percentile over
    prompts after the first epoch, frozen (A.2, A.3). There a prompt once without spread stays without, and new ones get
    the fewest responses.
    """

    def __init__(self, prior: float = PRIOR, retained: float = RETAINED, pool_visits: float = POOL_VISITS) -> None:
        self._prior, self._retained, self._pool_retained = prior, retained, 1.0 - 1.0 / pool_visits
        self._known: dict[int, _Evidence] = {}
        self._pool = _Evidence(0.0, 0.0)

    @property
    def empty(self) -> bool:
        """Whether nothing is known of any prompt."""
        return not self._pool.degrees

    def spread(self, prompt_id: int) -> float:
        """Return the standard deviation of one response's contribution. 1 for all prompts while nothing is known of
        any; 0 for all if no group has varied."""
        pool = self._pool
        if self.empty:
            return 1.0
        prior = self._prior * pool.squares / pool.degrees
        known = self._known.get(prompt_id)
        square = prior / self._prior if known is None else (prior + known.squares) / (self._prior + known.degrees)
        return float(np.sqrt(square))

    def observe(self, prompt_id: int, variance: float, responses: int) -> None:
        """Add one visit of at least 2 responses; see visit_variance. Visits must come in the canonical order of
        prompts."""
        degrees = responses - 1
        old = self._known.get(prompt_id, _Evidence(0.0, 0.0))
        self._known[prompt_id] = _Evidence(
            self._retained * old.degrees + degrees, self._retained * old.squares + degrees * variance
        )
        self._pool = _Evidence(
            self._pool_retained * self._pool.degrees + 1.0, self._pool_retained * self._pool.squares + variance
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON; floats are kept exactly."""
        known = {str(prompt_id): [e.degrees, e.squares] for prompt_id, e in self._known.items()}
        return {"known": known, "pool": [self._pool.degrees, self._pool.squares]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._known = {int(prompt_id): _Evidence(*pair) for prompt_id, pair in state["known"].items()}
        self._pool = _Evidence(*state["pool"])
