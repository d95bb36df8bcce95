"""pass@k and maj@k of n sampled responses to one prompt, as expectations over subsets of k of them. Owns the formulas;
callers decide which answers are right, and which are equal.
"""

from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray


def pass_at(k: int, right: int, n: int) -> float:
    """Return the unbiased probability that at least one of k responses is right, from n of which `right` are: 1 - C(n -
    right, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1). Binomials
    are exact integers, rounded once, so no n is too large. ValueError unless 1 <= k <= n and 0 <= right <= n."""
    if not (1 <= k <= n and 0 <= right <= n):
        raise ValueError(f"pass@{k} of {right} right responses among {n}")
    every = comb(n, k)
    return (every - comb(n - right, k)) / every


def majority_at(k: int, right: int, wrong: Sequence[int], silent: int = 0) -> float:
    """Return the exact probability, over all subsets of k responses, that the right answer is the most frequent one.
    Ties are broken with equal chances. Without any answer nothing wins.

    `right`: responses with the right answer. `wrong`: responses per wrong answer. `silent`: responses without an
    answer. For every number v of votes for the right answer, the subsets in which no other has more are counted. They
    are the product of the others' generating functions, cut at degree v, which also counts ties. Numbers are binomial
    probabilities with success k / n instead of counts: all between 0 and 1, whatever n is, and their common factor
    cancels. ValueError unless 1 <= k <= n.
    """
    n = right + sum(wrong) + silent
    if not 1 <= k <= n:
        raise ValueError(f"maj@{k} of {n} responses")
    if k == n:
        best = max([right, *wrong])
        return 0.0 if not right or right < best else 1.0 / [right, *wrong].count(best)
    chances = {size: _binomial(size, k / n) for size in {right, silent, n, *wrong}}
    found = 0.0
    for votes in range(1, min(right, k) + 1):
        others = _others(votes, k - votes, wrong, silent, chances)
        shares = 1.0 / np.arange(1, len(others) + 1)
        found += float(chances[right][votes] * (others[:, -1] @ shares))
    return found / float(chances[n][k])


def _others(
    votes: int, rest: int, wrong: Sequence[int], silent: int, chances: dict[int, NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return [ties, rest + 1]: the chance of each number of wrong and silent responses, with no wrong answer above
    `votes`, and as many of them equal to it as the first index."""
    made = np.zeros((rest // votes + 1, rest + 1))
    made[0, 0] = 1.0
    for size in wrong:
        before, made = made, np.zeros_like(made)
        for count in range(min(size, votes - 1, rest) + 1):
            made[:, count:] += chances[size][count] * before[:, : rest + 1 - count]
        if size >= votes and votes <= rest:
            made[1:, votes:] += chances[size][votes] * before[:-1, : rest + 1 - votes]
    none = np.zeros_like(made)
    for count in range(min(silent, rest) + 1):
        none[:, count:] += chances[silent][count] * made[:, : rest + 1 - count]
    return none


def _binomial(size: int, p: float) -> NDArray[np.float64]:
    """Return [size + 1]: probabilities of the numbers of successes in `size` trials, 0 < p < 1."""
    counts = np.arange(size + 1)
    ratios = np.concatenate([[0.0], np.log((size - counts[:-1]) / counts[1:] * (p / (1 - p)))])
    logs = np.cumsum(ratios)
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())
