"""With which probability late responses to a prompt go on (rollout.abort.keep: auto). Owns the formula and what is
known of late responses; who is late, and what their lengths are, comes as numbers.

At probability k a response costs c0 + q k c1 tokens and adds V0 + q M / k to the variance: q of them are late, each
takes c1 tokens more if it goes on, and counts 1 / k times then, with the mean square M of what it contributes. At a
price per token the sum of variance and cost is least at k = sqrt(M / (price * c1)) / n for n responses. DUET has one
probability for all (0.1), and the price in the counts alone (A.2.4).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from policies.token_budget.spread import SpreadModel


def best_keep(square: float, excess_tokens: float, price: float, responses: float, *, least: float) -> float:
    """The probability of least variance at a price, within [least, 1].

    `square`: M, of a late response. `excess_tokens`: c1. `price`: variance that a token is worth, the sum of
    spread^2 / n over prompts (allocation.Allocation.price); at 0, before any two rewards have differed, all go on, for
    a late response may be the first to be right. `responses`: n.
    """
    cost = price * excess_tokens
    return float(np.clip(np.sqrt(square / cost) / responses, least, 1.0)) if cost > 0 else 1.0


def price_of_equal(spread: ArrayLike, tokens: ArrayLike, responses: int) -> float:
    """The price at which equal counts are right on average: what one response more of each prompt takes off the sum of
    spread^2 / n, per token. Where there is no budget."""
    return float((np.asarray(spread) ** 2).sum()) / (responses**2 * float(np.sum(tokens)))


class LateModel:
    """Mean square of what late responses to a prompt contribute (policies.token_budget.spread.squares), as if none were
    given up. Kept like spreads, with late responses for degrees of freedom."""

    def __init__(self) -> None:
        self._squares = SpreadModel()

    def square(self, prompt_id: int) -> float | None:
        """None before any late response to any prompt."""
        return None if self._squares.empty else self._squares.spread(prompt_id) ** 2

    def observe(self, prompt_id: int, contributed: Sequence[float]) -> None:
        """Of each late response of one visit: its square divided by its propensity, 0 if it was given up: right in the
        mean whatever late responses come to, and whatever the probability. In the canonical order of prompts."""
        if contributed:
            self._squares.observe(prompt_id, float(np.mean(contributed)), len(contributed) + 1)

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        return self._squares.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._squares.load_state_dict(state)
