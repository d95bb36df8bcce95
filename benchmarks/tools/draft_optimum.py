"""The optimum of DAS 4.2.2: how much to draft for each request of a batch whose lengths are known. Owns arithmetic.

A request of l tokens for which p are drafted over its life gets A = k l (1 - exp(-alpha p / l)) of them accepted (3),
and needs l - A passes. A pass costs base + row * n. The paper's objective (5) adds all drafted tokens as cost, but the
rows that are verified in all are sum(l - A + p): an accepted token takes the place of a row. The
two differ in what a drafted token costs, 1 or 1 - dA/dp, so `exchange` 0 or 1 tells them apart. At the optimum all
requests longer than N passes end together after N (6), p follows from N (7, where 1/k stands for the paper's k), and N
from the condition

    sum over l_i > N of (1 / (alpha_i (k_i - 1 + N / l_i)) - exchange) = base / row.

Its left side falls in N, and jumps down where N passes a length: there the optimum is that length itself. It grows
without bound towards the most that drafting can save, N = max l_i (1 - k_i).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests [n]; alpha k <= 1, for no more is accepted than drafted."""

    lengths: FloatArray
    alpha: FloatArray
    k: FloatArray

    def drafted(self, passes: float) -> FloatArray:
        """[n]: p of each request, so that it ends within so many passes."""
        saved = np.maximum(1 - passes / self.lengths, 0)
        return -self.lengths / self.alpha * np.log1p(-saved / self.k)

    def accepted(self, drafted: FloatArray) -> FloatArray:
        """[n]: A of each request."""
        return -self.k * self.lengths * np.expm1(-self.alpha * drafted / self.lengths)


def cost(batch: Batch, drafted: FloatArray, ratio: float, exchange: int = 1) -> float:
    """Of the whole batch, in rows; ratio: base / row."""
    accepted = batch.accepted(drafted)
    passes = float((batch.lengths - accepted).max())
    return ratio * passes + float((batch.lengths + drafted - exchange * accepted).sum())


def best_passes(batch: Batch, ratio: float, exchange: int = 1) -> float:
    """N: passes of the cheapest way, to about 1e-12 of it. exchange 1: an accepted token takes the place of a row;
    0: the paper's objective."""
    lengths = batch.lengths
    floor, top = float((lengths * (1 - batch.k)).max()), float(lengths.max())
    if _pull(batch, np.nextafter(top, 0), exchange) > ratio:
        return top
    kinks = np.unique(lengths[(lengths > floor) & (lengths < top)])
    edges = np.concatenate([[floor], kinks, [top]])
    # The segment in which the condition changes sign; its right end belongs to the jump there.
    low, high = 0, len(edges) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if _pull(batch, edges[middle], exchange) > ratio:
            low = middle
        else:
            high = middle
    left, right = float(edges[low]), float(edges[high])
    if _pull(batch, np.nextafter(right, 0), exchange) > ratio:
        return right
    for _ in range(100):
        middle_passes = (left + right) / 2
        if _pull(batch, middle_passes, exchange) > ratio:
            left = middle_passes
        else:
            right = middle_passes
    return right


def prices(batch: Batch, passes: float) -> FloatArray:
    """[n]: what a pass is worth to each request at the corrected optimum, in rows. They add up to base / row, unless
    the optimum is a length, whose request then has the rest."""
    live = batch.lengths > passes
    rate = batch.alpha * (batch.k - 1 + passes / batch.lengths)
    return np.where(live, 1 / np.where(live, rate, 1.0) - 1, 0.0)


def _pull(batch: Batch, passes: float, exchange: int) -> float:
    """Rows that one pass less costs."""
    live = batch.lengths > passes
    lengths, alpha, k = batch.lengths[live], batch.alpha[live], batch.k[live]
    rate = alpha * (k - 1 + passes / lengths)
    if (rate <= 0).any():
        return np.inf
    return float((1 / rate - exchange).sum())


def by_brute_force(batch: Batch, ratio: float, exchange: int = 1, points: int = 2001) -> float:
    """The least cost, by looking everywhere, thrice as closely as before."""
    lengths = batch.lengths
    floor, top = float((lengths * (1 - batch.k)).max()), float(lengths.max())
    low, high, best = floor + 1e-9 * top, top, np.inf
    for _ in range(4):
        grid = np.unique(
            np.concatenate([np.linspace(low, high, points), lengths[(lengths >= low) & (lengths <= high)]])
        )
        costs = np.array([cost(batch, batch.drafted(passes), ratio, exchange) for passes in grid])
        at = int(costs.argmin())
        best = min(best, float(costs[at]))
        low, high = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, len(grid) - 1)])
    return best


def random_batch(rng: np.random.Generator) -> tuple[Batch, float]:
    """A batch and its base / row: log-normal lengths, often piled up at a cap, some equal; drafters weak to perfect."""
    requests = int(rng.integers(1, 129))
    lengths = np.ceil(np.exp(rng.normal(6, rng.uniform(0.1, 1.5), requests)))
    if rng.random() < 0.4:
        lengths = np.minimum(lengths, np.quantile(lengths, rng.uniform(0.3, 1)))
    k = rng.uniform(0.05, 1.0, requests) if rng.random() < 0.7 else np.full(requests, rng.uniform(0.05, 1))
    alpha = rng.uniform(0.02, 1, requests) / k
    return Batch(lengths, alpha, k), float(np.exp(rng.uniform(np.log(0.5), np.log(1000))))


def survival(batch: Batch, efforts: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(rows drafted per pass, tokens per pass), both [n, efforts]: the world of (3), pass by pass. `efforts`: p / l.

    In it, l (1 - f) passes draft p = x l tokens, with f = k (1 - exp(-alpha x)): each drafts x / (1 - f) and brings
    1 / (1 - f) tokens.
    """
    kept = 1 + batch.k[:, None] * np.expm1(-batch.alpha[:, None] * efforts)
    return efforts / kept, 1 / kept
