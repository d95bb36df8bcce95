"""The probability that late responses to a prompt continue (rollout.abort.keep: auto).

Owns the formula and the statistics of late responses; which are late, and their lengths, is passed as numbers.

At probability k a response costs c0 + q k c1 tokens and adds V0 + q M / k to the variance. q of the responses are late.
Each takes c1 more tokens if it continues, and then counts 1 / k times, with mean square M of its contribution. At a
price per token the sum of variance and cost is least at k = sqrt(M / (price * c1)) / n for n responses. DUET has one
probability for all (0.1), and the price in the counts alone (A.2.4).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from policies.token_budget.spread import SpreadModel


def best_keep(square: float, excess_tokens: float, price: float, responses: float, *, least: float) -> float:
    """Return the probability of least variance at a price, within [least, 1].

    `square`: M, of a late response. `excess_tokens`: c1. `price`: variance that a token is worth, for the sum of
    spread^2 / n over prompts (allocation.allocate). At 0, before any two rewards have differed, all continue,
    since a late response may be the first right one. `responses`: n.
    """
    cost = price * excess_tokens
    return float(np.clip(np.sqrt(square / cost) / responses, least, 1.0)) if cost > 0 else 1.0


def price_of_equal(spread: ArrayLike, tokens: ArrayLike, responses: int) -> float:
    """Return the price at which equal counts are right on average, for use without a budget. It is the reduction of the
    sum of spread^2 / n by one more response per prompt, per token."""
    return float((np.asarray(spread) ** 2).sum()) / (responses**2 * float(np.sum(tokens)))


class LateModel:
    """Mean square of late responses' contributions to a prompt (policies.token_budget.spread.squares), as if none were
    given up. Stored like spreads, with late responses as degrees of freedom."""

    def __init__(self) -> None:
        self._squares = SpreadModel()

    def square(self, prompt_id: int) -> float | None:
        """Return M of a prompt; None before any late response to any prompt."""
        return None if self._squares.empty else self._squares.spread(prompt_id) ** 2

    def observe(self, prompt_id: int, contributed: Sequence[float]) -> None:
        """Add the late responses of one visit: each square divided by its propensity, 0 if given up. This is unbiased
        for any contributions and probabilities. Visits must come in the canonical order of prompts."""
        if contributed:
            self._squares.observe(prompt_id, float(np.mean(contributed)), len(contributed) + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return self._squares.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._squares.load_state_dict(state)
