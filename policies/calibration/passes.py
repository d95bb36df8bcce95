"""Seconds of passes, by requests, rows and context: a roofline times a measured deviation of that shape.

Owns both; excludes drift and drafts. A shape's deviation moves with its first measurements, and slowly afterwards. The
roofline is fitted again at growing intervals, and moves only shapes without nearby measurements.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from policies.calibration.document import FEW, MOST, Calibration, PassCost
from policies.calibration.roofline import PROCESSOR, FreeRows, MeasuredPass, Roofline, fit_roofline
from policies.calibration.solve import FloatArray
from policies.calibration.typical import Typical

CLIP = 0.25  # of a logarithm: the most that an interrupted step counts
_SETTLED = 64  # measurements of a shape after which it moves by 1 / _SETTLED of a surprise; before, by 1 / measurements
_EXACT_ROWS = 16  # processors compute 1, 2, 4, 8, 16 rows by different code; beyond, eight shapes an octave
_NEAR, _ACROSS = 0.08, 0.3  # in logarithms of rows: distance that halves a weight; factor for requests
_ALONE = 0.2  # of a logarithm: a single time this far from the roofline has half the weight
_DOUBT = 0.05  # weight of zero deviation from the roofline, against 1 of a measurement of that very shape
_PROMPT_SURE = 0.3  # weight of a step with prompt rows: it is often the first of its kind, and draws fewer tokens
_KNOWN = 64  # measurements after which an earlier fit regularises a later one
_FIRST_FIT, _LAST_FIT = 4, 4096  # measurements before the first fit, and most between two
_CLOSE = 0.03  # of a logarithm: no fit is made while no shape is further from the roofline
_KEPT = 4096  # entries of a cache
_MOVED = 0.01  # of a logarithm: change of a shape after which others use it
_VALUE = 2  # index of the deviations in the table


@dataclass(slots=True, kw_only=True)
class _Shape:
    """Passes with similar numbers of rows and requests."""

    requests: int
    rows: int
    context_tokens: float
    place: int  # column in the table
    usual: Typical = field(default_factory=Typical)  # logarithms of seconds over the roofline's
    sure: float = 1.0

    @property
    def weight(self) -> float:
        """The weight, at most 1. A single time far from the roofline may come from an interrupted pass."""
        count, value = self.usual.count, self.usual.value
        return self.sure * (min(count, FEW) if count > 1 else 1 / (1 + (value / _ALONE) ** 2)) / FEW

    def seconds(self, roofline: Roofline) -> float:
        context_tokens = round(self.context_tokens)
        return roofline.seconds(self.requests, self.rows, context_tokens) * math.exp(self.usual.value)


class PassCosts:
    """The pass costs of one engine."""

    def __init__(self, calibration: Calibration | None = None, free: FreeRows = PROCESSOR) -> None:
        """`free`: prior knowledge of the device, without a calibration."""
        self.roofline: Roofline | None = None
        self._free = free
        self._spread = free.spread
        self._wide = 0  # measured passes of more rows than requests: they show what a row costs
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._exact: dict[tuple[int, int], _Shape] = {}  # by requests and rows
        self._calibrated = calibration is not None and bool(calibration.passes)
        self._decoded = self._calibrated  # a pass without prompts was measured; prompts alone do not show its cost
        self._seen, self._fit_at = 0, _LAST_FIT if self._calibrated else _FIRST_FIT
        self._lines: dict[tuple[int, int, int], float] = {}  # the roofline's seconds
        self._factors: dict[tuple[int, int], float] = {}  # by requests and rows: measured deviation from it
        # Per shape, in order: logarithms of rows and of requests, its deviation, its weight.
        self._table: FloatArray = np.zeros((4, 64))
        if calibration is not None:
            self._start(calibration)

    def _start(self, calibration: Calibration) -> None:
        passes = calibration.passes
        self.roofline = calibration.fitted
        if self.roofline is None and passes:
            self.roofline = fit_roofline([one.measured for one in passes], free=self._free)
        for one in passes:
            assert self.roofline is not None
            shape = self._shape(one.requests, one.rows, one.context_tokens)
            difference = math.log(one.seconds / self.roofline.seconds(one.requests, one.rows, one.context_tokens))
            self._wide += one.count * (one.rows > one.requests)
            # Several contexts of one shape are averaged; the roofline extrapolates to other contexts.
            total = shape.usual.count + one.count
            shape.usual.value += (difference - shape.usual.value) * one.count / total
            shape.context_tokens += (one.context_tokens - shape.context_tokens) * one.count / total
            shape.usual.count = total
        for shape in self._shapes.values():
            shape.usual.settle(_SETTLED)
            self._note(shape)

    def at(self, requests: int, rows: int, context_tokens: int) -> float | None:
        """Return the seconds, with the context rounded to an eighth. None before a pass without prompts was
        measured."""
        if self.roofline is None or not self._decoded:
            return None
        shift = context_tokens.bit_length() - 4
        key = requests, rows, context_tokens >> shift << shift if shift > 0 else context_tokens
        seconds = self._lines.get(key)
        if seconds is None:
            if len(self._lines) >= _KEPT:
                self._lines.clear()
            seconds = self._lines[key] = self.roofline.seconds(*key)
        factor = self._factors.get((requests, rows))
        return seconds * (self._factor(requests, rows) if factor is None else factor)

    def seen(self, requests: int, rows: int, times: int = 1) -> bool:
        """Whether such passes were measured so many times."""
        shape = self._shapes.get(_key(requests, rows))
        return shape is not None and shape.usual.count >= times

    def most(self, requests: int, rows: int, context_tokens: int) -> float | None:
        """Return the seconds that it may take, >= `at`. Where such a shape was hardly measured, a row may be a standard
        error dearer, but not dearer than in a plain step: several of those compute the same."""
        seconds, plain_s = self.at(requests, rows, context_tokens), self.at(requests, requests, context_tokens)
        if seconds is None or plain_s is None:
            return None
        if self.seen(requests, rows, FEW):
            return seconds
        dear_s = plain_s + (seconds - plain_s) * math.exp(self._spread / math.sqrt(1 + self._wide))
        return max(seconds, min(dear_s, plain_s * rows / requests))

    def add(
        self,
        requests: int,
        rows: int,
        context_tokens: int,
        seconds: float,
        *,
        sure: bool,
        common: float = 0.0,
    ) -> float:
        """Add a pass's time. `sure`: without prompt chunks. `common`: the logarithm by which all recent passes exceeded
        their expectation, which this shape does not learn. Returns the logarithm by which this one did; 0.0 without an
        expectation."""
        self._seen += 1
        self._wide += rows > requests
        if self.roofline is None:
            self.roofline = fit_roofline([MeasuredPass(requests, rows, context_tokens, seconds)], free=self._free)
        shape = self._shape(requests, rows, context_tokens)
        usual, surprise = shape.usual, 0.0
        over = math.log(seconds / self.roofline.seconds(requests, rows, context_tokens))
        replaced = sure and shape.sure < 1.0 and usual.count > 0
        if replaced:  # a decoding pass replaces what prompts showed
            usual = shape.usual = Typical()
        if usual.count < FEW:
            # Without nearby measurements the expectation is a guess, so its error is no drift.
            if sure and not replaced and self._calibrated:
                surprise = over - math.log(self._factor(requests, rows))
            if not usual.count:
                shape.sure = 1.0 if sure else _PROMPT_SURE
            usual.add(over - common)
            self._note(shape)
            if usual.count in (1, FEW):
                self._factors.clear()
            else:  # its neighbours use it later
                self._factors.pop((requests, rows), None)
        elif sure:
            surprise = over - usual.value
            usual.count += 1
            usual.value += (clipped(surprise) - common) / min(usual.count, _SETTLED)
            if abs(usual.value - self._table[_VALUE, shape.place]) > _MOVED:
                self._note(shape)
                self._factors.clear()
        shape.context_tokens += (context_tokens - shape.context_tokens) / min(usual.count + 1, _SETTLED)
        if self._seen >= self._fit_at or (sure and not self._decoded):
            self._decoded |= sure
            self._fit()
        return surprise

    def measured(self) -> Iterator[PassCost]:
        """Yield the cost of every shape."""
        for shape in self._shapes.values():
            if self.roofline is not None and shape.usual.count:
                yield PassCost(
                    requests=shape.requests,
                    rows=shape.rows,
                    context_tokens=round(shape.context_tokens),
                    seconds=shape.seconds(self.roofline),
                    count=max(round(shape.sure * min(shape.usual.count, MOST)), 1),
                )

    def _shape(self, requests: int, rows: int, context_tokens: int) -> _Shape:
        exact = requests, rows
        shape = self._exact.get(exact)
        if shape is None:
            key = _key(requests, rows)
            shape = self._shapes.get(key)
            if shape is None:
                shape = self._shapes[key] = _Shape(
                    requests=requests, rows=rows, context_tokens=float(context_tokens), place=len(self._shapes)
                )
                if shape.place == self._table.shape[1]:
                    self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
            if len(self._exact) >= _KEPT:
                self._exact.clear()
            self._exact[exact] = shape
        return shape

    def _fit(self) -> None:
        """Fit the roofline again. The measured times of shapes stay."""
        self._fit_at = self._seen + min(self._seen, _LAST_FIT)
        before = self.roofline
        assert before is not None
        shapes = [shape for shape in self._shapes.values() if shape.usual.count]
        if self._seen > _FIRST_FIT and all(abs(shape.usual.value) < _CLOSE for shape in shapes):
            return  # a fit takes as long as some steps of a small model
        passes = [
            MeasuredPass(shape.requests, shape.rows, round(shape.context_tokens), shape.seconds(before), shape.weight)
            for shape in shapes
        ]
        # An early fit had too few measurements to regularise a later one.
        known = self._calibrated or self._seen > _KNOWN
        after = self.roofline = fit_roofline(passes, before if known else None, self._free)
        for shape, one in zip(shapes, passes, strict=True):
            shape.usual.move_to(math.log(one.seconds / after.seconds(one.requests, one.rows, one.context_tokens)))
            self._note(shape)
        self._lines.clear()
        self._factors.clear()

    def _note(self, shape: _Shape) -> None:
        """Write the shape's present state to the table."""
        at = math.log(shape.rows), math.log(shape.requests), shape.usual.value, shape.weight
        self._table[:, shape.place] = at

    def _factor(self, requests: int, rows: int) -> float:
        """Return the measured deviation from the roofline of passes near that shape, as a factor."""
        key = requests, rows
        factor = self._factors.get(key)
        if factor is None:
            if len(self._factors) >= _KEPT:
                self._factors.clear()
            by_rows, by_requests, differences, sure = self._table[:, : len(self._shapes)]
            far = (by_rows - math.log(rows)) ** 2 + (_ACROSS * (by_requests - math.log(requests))) ** 2
            weights = sure / (1 + far / _NEAR**2)
            factor = math.exp(float(weights @ differences) / (float(weights.sum()) + _DOUBT))
            self._factors[key] = factor
        return factor


def _key(requests: int, rows: int) -> tuple[int, int]:
    """Return what passes of one shape have in common."""
    by_rows = rows if rows <= _EXACT_ROWS else _EXACT_ROWS + round(8 * math.log2(rows / _EXACT_ROWS))
    return by_rows, requests if requests <= 4 else 4 + round(2 * math.log2(requests / 4))


def clipped(logarithm: float) -> float:
    return min(max(logarithm, -CLIP), CLIP)
