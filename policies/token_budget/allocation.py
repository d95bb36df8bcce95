"""The number of responses per prompt of an RL step under one token budget. Owns the formula and its rounding. Knowledge
of prompts is passed as numbers, and nothing is random.

The estimate of a prompt's gradient has a variance of spread^2 / n with n responses; n responses cost n * tokens.
Source: DUET, theorem 1 (cost-weighted Neyman allocation) and equation (4).
"""

from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_NO_SPREAD = 1e-6  # of the largest: the floor of spreads, so that a rest of the budget is shared evenly
_HALVINGS = 128  # at most; the bracket reaches two neighbouring floats before


def allocate(
    spread: Floats, tokens: Floats, budget_tokens: float, *, least: int, most: int
) -> tuple[NDArray[np.int64], float]:
    """Return the counts [prompts] of least variance that cost `budget_tokens`: about spread / sqrt(price * tokens), in
    [least, most]. Also the price, lambda: the variance that the last response removes, per token.

    `spread`: [prompts], the standard deviation of one response's contribution, at least 0. `tokens`: [prompts], the
    expected cost of a response, above 0. Response n of a prompt reduces the variance by spread^2 / (n * (n - 1)). At a
    given price each prompt buys responses while that, per token, is worth it (the divisors of Huntington and Hill).
    Bisection finds the price. The rest of the budget then goes to the next best response per token that fits, earlier
    prompts first in a tie. With equal tokens these are the whole counts of least variance; otherwise nearly so. The
    paper rounds the real solution, and may miss the budget by half a response per prompt.

    The cost exceeds the budget by at most half a mean length, unless `least` alone does. It stays below by less than
    that while some prompt of at most the mean length has fewer than `most`. Raises ValueError.
    """
    if spread.shape != tokens.shape or spread.ndim != 1 or not 1 <= least <= most:
        raise ValueError(f"spread {spread.shape} and tokens {tokens.shape} of each prompt, 1 <= {least} <= {most}")
    if not (np.isfinite(spread).all() and np.isfinite(tokens).all() and (spread >= 0).all() and (tokens > 0).all()):
        raise ValueError("spreads must be finite and not negative, tokens finite and positive")
    if not spread.size:
        return np.zeros(0, np.int64), 0.0
    largest = float(spread.max())
    relative = spread / largest if largest else np.ones_like(spread)
    worth = np.maximum(relative, _NO_SPREAD) ** 2 / tokens  # benefit of response n, times n * (n - 1)
    high = float(worth.max()) / (least * (least + 1)) * (1 + 1e-9)  # no prompt buys
    low = float(worth.min()) / (most * most)  # every prompt has `most`
    for _ in range(_HALVINGS):
        middle = float(np.sqrt(low) * np.sqrt(high))
        if not low < middle < high:
            break
        if float((_bought(worth, middle, least, most) * tokens).sum()) <= budget_tokens:
            high = middle
        else:
            low = middle
    counts = _bought(worth, high, least, most)
    _spend(counts, worth, tokens, budget_tokens - float((counts * tokens).sum()), most)
    return counts, high * largest**2


def _bought(worth: Floats, price: float, least: int, most: int) -> NDArray[np.int64]:
    """Return the last n with worth / (n * (n - 1)) >= price, within bounds."""
    return np.clip(np.floor(0.5 + np.sqrt(0.25 + worth / price)), least, most).astype(np.int64)


def _spend(counts: NDArray[np.int64], worth: Floats, tokens: Floats, left_tokens: float, most: int) -> None:
    """Spend the rest on one response after another, best first. A response that does not fit is dropped for good: it
    would end further from the budget than before, or more than half a mean length above it."""
    half_mean = float(tokens.mean()) / 2
    ready = [(-float(worth[i]) / float(n * (n + 1)), i) for i, n in enumerate(counts.tolist()) if n < most]
    heapify(ready)
    while ready and left_tokens > 0:
        _, i = ready[0]
        over = float(tokens[i]) - left_tokens
        if over > min(left_tokens, half_mean):
            heappop(ready)
            continue
        counts[i] += 1
        left_tokens = -over
        n = int(counts[i])
        if n < most:
            heapreplace(ready, (-float(worth[i]) / float(n * (n + 1)), i))
        else:
            heappop(ready)


def variance(spread: Floats, counts: Floats | NDArray[np.int64]) -> float:
    """Return the variance of the mean over prompts of each prompt's mean over its responses: sum of spread^2 / n, over
    prompts^2. `counts` need not be whole. Source: DUET, equation (1)."""
    return float((spread**2 / counts).sum()) / max(spread.size, 1) ** 2


def bound(spread: Floats, tokens: Floats) -> float:
    """Return the largest share of the variance of equal counts that other counts of the same cost can save. Fractions
    are allowed, without bounds: 1 - (sum spread sqrt(tokens))^2 / (sum tokens * sum spread^2), by Cauchy and Schwarz.
    """
    whole = float(tokens.sum()) * float((spread**2).sum())
    return max(0.0, 1.0 - float((spread * np.sqrt(tokens)).sum()) ** 2 / whole) if whole else 0.0
