"""Seconds that drafters take, by strategy and requests. Owns the estimate; knows no passes and no drift.

    draft = fixed + each * requests + depth * (level + level_each * requests), all at least 0

fitted per drafter to relative errors, times what a strategy was measured to differ from it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from policies.calibration.document import FEW
from policies.speculation.strategy import Strategy

_GAIN = 1 / 12  # by which a later one moves the logarithm
_CLIP = 0.4  # of a logarithm: what a step that was interrupted counts at most
_PRIOR = 0.02  # weight of an even split of the causes, against a measurement's 1
_NEAR = 0.35  # of a logarithm of requests: measurements further away say half as much


@dataclass(slots=True)
class Typical:
    """A robust mean of logarithms: of the first few the lower median, later a slow walk that no outlier carries far."""

    value: float = 0.0
    count: int = 0
    first: list[float] = field(default_factory=list)

    def add(self, logarithm: float) -> None:
        self.count += 1
        if self.count <= FEW:
            self.first.append(logarithm)
            self.value = sorted(self.first)[(len(self.first) - 1) // 2]
        else:
            self.value += _GAIN * min(max(logarithm - self.value, -_CLIP), _CLIP)

    def settle(self, count: int) -> None:
        """Known from before: if from more than a few, as surely as by `count`."""
        self.count, self.first = (
            (max(self.count, count), []) if self.count >= FEW else (self.count, [self.value] * self.count)
        )

    def move_to(self, value: float) -> None:
        """Measured against something else."""
        self.first = [one + value - self.value for one in self.first]
        self.value = value


@dataclass(slots=True)
class _Drafter:
    cells: dict[tuple[Strategy, int], Typical] = field(default_factory=dict)  # by strategy and requests
    prices: Sequence[float] = (0.0, 0.0, 0.0, 0.0)
    fit_at: int = 1  # measurements at which the next fit is due
    seen: int = 0


def _causes(strategy: Strategy, requests: int) -> tuple[float, float, float, float]:
    return 1.0, float(requests), float(strategy.depth), float(strategy.depth * requests)


class DraftCosts:
    """By drafter."""

    def __init__(self) -> None:
        self._drafters: dict[str, _Drafter] = {}
        self._cache: dict[tuple[Strategy, int], float | None] = {}

    def add(self, strategy: Strategy, requests: int, seconds: float, count: int = 1) -> None:
        """A step drafted for `requests` requests; or `count` of them did, typically in so many seconds."""
        drafter = self._drafters.setdefault(strategy.drafter, _Drafter())
        cell = drafter.cells.setdefault((strategy, requests), Typical())
        before, logarithm = cell.value, math.log(max(seconds, 1e-8))
        cell.add(logarithm)
        if count > 1:
            cell.value, cell.count = logarithm, count
            cell.settle(count)
        drafter.seen += 1
        if drafter.seen >= drafter.fit_at:
            drafter.fit_at = min(2 * drafter.fit_at, drafter.fit_at + 4096)
            drafter.prices = _fit([(*key, math.exp(cell.value), cell.count) for key, cell in drafter.cells.items()])
            self._cache.clear()
        elif cell.count <= FEW or abs(cell.value - before) > 0.01:
            self._cache.clear()

    def at(self, strategy: Strategy, requests: int) -> float | None:
        """Seconds; None: nothing of the drafter was measured."""
        key = strategy, requests
        try:
            return self._cache[key]
        except KeyError:
            value = self._cache[key] = self._estimate(strategy, requests)
            return value

    def measured(self) -> Iterator[tuple[Strategy, int, float, int]]:
        """(strategy, requests, seconds, count) of everything."""
        for drafter in self._drafters.values():
            for (strategy, requests), cell in drafter.cells.items():
                yield strategy, requests, math.exp(cell.value), cell.count

    def _estimate(self, strategy: Strategy, requests: int) -> float | None:
        drafter = self._drafters.get(strategy.drafter)
        if drafter is None:
            return None
        weights, total = 0.2, 0.0
        for (measured, count), cell in drafter.cells.items():
            if measured == strategy:
                weight = min(cell.count, FEW) / (1 + (math.log(count / requests) / _NEAR) ** 2) ** 2
                weights += weight
                total += weight * (cell.value - math.log(_price(drafter.prices, measured, count)))
        return _price(drafter.prices, strategy, requests) * math.exp(total / weights)


def _price(prices: Sequence[float], strategy: Strategy, requests: int) -> float:
    causes = _causes(strategy, requests)
    return max(sum(price * cause for price, cause in zip(prices, causes, strict=True)), 1e-8)


def _fit(cells: Sequence[tuple[Strategy, int, float, int]]) -> Sequence[float]:
    """Non-negative least squares of relative errors, held by an even split of the causes: coordinate descent."""
    rows = [([cause / seconds for cause in _causes(s, n)], min(count, FEW)) for s, n, seconds, count in cells]
    middle = [math.exp(-sum(math.log(row[i]) for row, _ in rows) / len(rows)) for i in range(4)]  # seconds per cause
    prior = [0.25 * value for value in middle]
    held = [_PRIOR * len(rows) / value**2 for value in prior]
    square = [[sum(w * row[i] * row[j] for row, w in rows) for j in range(4)] for i in range(4)]
    wanted = [sum(w * row[i] for row, w in rows) for i in range(4)]
    prices = list(prior)
    for _ in range(60):
        for i in range(4):
            rest = sum(square[i][j] * prices[j] for j in range(4) if j != i)
            prices[i] = max((wanted[i] + held[i] * prior[i] - rest) / (square[i][i] + held[i]), 0.0)
    return prices
