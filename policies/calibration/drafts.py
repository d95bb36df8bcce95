"""Seconds of drafting, by strategy and requests. Owns the estimate; excludes passes and drift.

    draft = fixed + each * requests + depth * (level + level_each * requests), all at least 0

fitted per drafter to relative errors, times a strategy's measured deviation from it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from config.strategy import Strategy
from policies.calibration.document import FEW, MOST, Calibration, DraftCost
from policies.calibration.typical import Typical

_PRIOR = 0.02  # weight of an even split of the terms, against a measurement's 1
_NEAR = 0.35  # of a logarithm of requests: measurements further away have a smaller weight
_LEAST_S = 1e-8
_LAST_FIT = 4096  # most measurements between two fits
_Prices = tuple[float, float, float, float]  # fixed, each, level, level_each


@dataclass(slots=True)
class _Cell:
    depth: int
    requests: int
    usual: Typical = field(default_factory=Typical)  # logarithms of seconds


@dataclass(slots=True)
class _Drafter:
    cells: dict[str, dict[int, _Cell]] = field(default_factory=dict)  # by strategy and requests
    prices: _Prices = (0.0, 0.0, 0.0, 0.0)
    fit_at: int = 1  # measurements at which the next fit is due
    seen: int = 0

    def fit(self) -> None:
        self.fit_at = self.seen + min(self.seen, _LAST_FIT)
        self.prices = _fit([cell for cells in self.cells.values() for cell in cells.values()])


class DraftCosts:
    """The costs by drafter."""

    def __init__(self, calibration: Calibration | None = None) -> None:
        self._drafters: dict[str, _Drafter] = {}
        self._cache: dict[tuple[Strategy, int], float | None] = {}
        for one in () if calibration is None else calibration.drafts:
            drafter = self._drafters.setdefault(one.drafter, _Drafter())
            usual = Typical(math.log(one.seconds), one.count)
            usual.settle(one.count)
            drafter.cells.setdefault(one.strategy, {})[one.requests] = _Cell(one.depth, one.requests, usual)
        for drafter in self._drafters.values():
            drafter.fit()
            drafter.fit_at = 64

    def add(self, strategy: Strategy, requests: int, seconds: float) -> None:
        """Add a step that drafted for `requests` requests."""
        drafter = self._drafters.setdefault(strategy.drafter, _Drafter())
        cells = drafter.cells.setdefault(str(strategy), {})
        cell = cells.get(requests)
        if cell is None:
            cell = cells[requests] = _Cell(strategy.depth, requests)
        before = cell.usual.value
        cell.usual.add(math.log(max(seconds, _LEAST_S)))
        drafter.seen += 1
        if drafter.seen >= drafter.fit_at:
            drafter.fit()
            self._cache.clear()
        elif cell.usual.value != before:  # other loads of the strategy use it after the next fit
            self._cache.pop((strategy, requests), None)

    def at(self, strategy: Strategy, requests: int) -> float | None:
        """Return the seconds; None if nothing of the drafter was measured."""
        key = strategy, requests
        try:
            return self._cache[key]
        except KeyError:
            value = self._cache[key] = self._estimate(strategy, requests)
            return value

    def most(self, strategy: Strategy, requests: int) -> float | None:
        """Return the seconds that it may take, >= `at`: of a strategy that was never measured in proportion to another
        one's depth, and to its requests."""
        seconds, drafter = self.at(strategy, requests), self._drafters.get(strategy.drafter)
        if seconds is None or drafter is None or str(strategy) in drafter.cells:
            return seconds
        cells = [cell for cells in drafter.cells.values() for cell in cells.values()]
        of = (max(strategy.depth / one.depth, 1) * max(requests / one.requests, 1) for one in cells)
        return max(seconds, min(times * math.exp(one.usual.value) for times, one in zip(of, cells, strict=True)))

    def timed(self, drafter: str) -> int:
        """Usual steps of it that were measured here; none of a calibration's."""
        found = self._drafters.get(drafter)
        return 0 if found is None else found.seen

    def measured(self) -> Iterator[DraftCost]:
        """Yield all measurements."""
        for drafter in self._drafters.values():
            for strategy, cells in drafter.cells.items():
                for requests, cell in cells.items():
                    seconds, count = math.exp(cell.usual.value), min(cell.usual.count, MOST)
                    yield DraftCost(strategy=strategy, requests=requests, seconds=seconds, count=count)

    def _estimate(self, strategy: Strategy, requests: int) -> float | None:
        drafter = self._drafters.get(strategy.drafter)
        if drafter is None:
            return None
        weights, total = 0.2, 0.0
        for measured, cell in drafter.cells.get(str(strategy), {}).items():
            weight = min(cell.usual.count, FEW) / (1 + (math.log(measured / requests) / _NEAR) ** 2) ** 2
            weights += weight
            total += weight * (cell.usual.value - math.log(_price(drafter.prices, cell.depth, measured)))
        return _price(drafter.prices, strategy.depth, requests) * math.exp(total / weights)


def _causes(depth: int, requests: int) -> tuple[float, float, float, float]:
    return 1.0, float(requests), float(depth), float(depth * requests)


def _price(prices: _Prices, depth: int, requests: int) -> float:
    fixed, each, level, level_each = prices
    return max(fixed + each * requests + depth * (level + level_each * requests), _LEAST_S)


def _fit(cells: Sequence[_Cell]) -> _Prices:
    """Fit the prices by non-negative least squares on relative errors, regularised toward an even split of the terms.
    Solved by coordinate descent."""
    rows = [
        (
            [cause / math.exp(cell.usual.value) for cause in _causes(cell.depth, cell.requests)],
            min(cell.usual.count, FEW),
        )
        for cell in cells
    ]
    middle = [math.exp(-sum(math.log(row[i]) for row, _ in rows) / len(rows)) for i in range(4)]  # seconds per term
    prior = [0.25 * value for value in middle]
    held = [_PRIOR * len(rows) / value**2 for value in prior]
    square = [[sum(w * row[i] * row[j] for row, w in rows) for j in range(4)] for i in range(4)]
    wanted = [sum(w * row[i] for row, w in rows) for i in range(4)]
    prices = list(prior)
    for _ in range(60):
        for i in range(4):
            rest = sum(square[i][j] * prices[j] for j in range(4) if j != i)
            prices[i] = max((wanted[i] + held[i] * prior[i] - rest) / (square[i][i] + held[i]), 0.0)
    fixed, each, level, level_each = prices
    return fixed, each, level, level_each
