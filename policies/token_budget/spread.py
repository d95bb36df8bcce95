"""How far the responses to one prompt are apart: what one response adds to the variance of the gradient's estimate, as
estimated from rewards and lengths. Owns the estimate of one visit and what is remembered from visit to visit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Best within a hundredth of the variance, of all kinds of prompts tried: docs/results/allocation.md.
PRIOR = 4.0  # responses' worth of evidence (degrees of freedom) that the pool counts for at each prompt
RETAINED = 0.5  # of a prompt's evidence at its next visit: the target model has moved since
POOL_VISITS = 512  # newest visits, about, that the pool is the mean of


def squares(rewards: Sequence[float], sizes: Sequence[float] | Floats | None = None) -> Floats:
    """[n]: the square of what each response contributes, (n - 1) / n * (its reward - mean of the others)^2 * its size.
    n >= 2.

    `sizes`: the mean square of a response's score in any unit, which the loss decides; all 1: the mean of the squares
    is the unbiased variance of the rewards. A sum over tokens has about its number of tokens (scores of tokens have no
    correlation: docs/results/allocation.md). DUET takes the rewards alone, as if each score were of one
    size (section 3.1).
    """
    values = np.asarray(rewards, dtype=np.float64)
    n = values.size
    apart = (values - values.mean()) * (n / (n - 1))  # from the mean of the others
    return np.asarray((n - 1) / n * apart**2 * (1.0 if sizes is None else np.asarray(sizes, dtype=np.float64)))


def visit_variance(contributed: Sequence[float] | Floats, propensities: Sequence[float] | None = None) -> float:
    """Mean of `squares`, each divided by its propensity.

    `propensities`: with which a response like this one is trained on, at weight 1 / propensity
    (contracts.rollout.Rollout). Where the coin decides, both of its sides stand for what late ones contribute, as
    policies.token_budget.keep.LateModel knows it. So it is the spread of what is summed, surcharge included, and less
    noisy than the kept ones alone.
    """
    weights = 1.0 if propensities is None else 1.0 / np.asarray(propensities, dtype=np.float64)
    return float((np.asarray(contributed) * weights).mean())


@dataclass(frozen=True, slots=True)
class _Evidence:
    degrees: float  # n - 1 of each visit, aged
    squares: float  # (n - 1) * its variance, aged alike


class SpreadModel:
    """spread^2 = (PRIOR * pool + squares) / (PRIOR + degrees), where a visit of n responses with variance v adds n - 1
    to the prompt's degrees and (n - 1) * v to its squares, and takes both of its earlier visits times RETAINED.

    The pool is the same for all prompts: an exponential mean of v over visits, each counting once, so that prompts with
    many responses do not make it theirs. One formula so gives the start (the pool, where nothing is known), a floor
    (never 0 once any group has varied) and forgetting (a prompt that was solved always comes back to the pool as it is
    visited with few responses). As it estimates the mean of spread^2 given what is known, allocating by it is the
    counts of least expected variance. The paper has a running mean of all visits instead, and for prompts that are new
    the 5th percentile over prompts after the first epoch, frozen (A.2, A.3): a prompt once without spread stays
    without, and new ones get the fewest responses.
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
        """Standard deviation of one response's contribution; 1 for all while nothing is known of any, 0 for all if no
        group has varied."""
        pool = self._pool
        if self.empty:
            return 1.0
        prior = self._prior * pool.squares / pool.degrees
        known = self._known.get(prompt_id)
        square = prior / self._prior if known is None else (prior + known.squares) / (self._prior + known.degrees)
        return float(np.sqrt(square))

    def observe(self, prompt_id: int, variance: float, responses: int) -> None:
        """One visit of at least 2 responses; see visit_variance. Visits must come in the canonical order of prompts."""
        degrees = responses - 1
        old = self._known.get(prompt_id, _Evidence(0.0, 0.0))
        self._known[prompt_id] = _Evidence(
            self._retained * old.degrees + degrees, self._retained * old.squares + degrees * variance
        )
        self._pool = _Evidence(
            self._pool_retained * self._pool.degrees + 1.0, self._pool_retained * self._pool.squares + variance
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON; floats survive it."""
        known = {str(prompt_id): [e.degrees, e.squares] for prompt_id, e in self._known.items()}
        return {"known": known, "pool": [self._pool.degrees, self._pool.squares]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._known = {int(prompt_id): _Evidence(*pair) for prompt_id, pair in state["known"].items()}
        self._pool = _Evidence(*state["pool"])
