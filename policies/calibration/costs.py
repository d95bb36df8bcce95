"""What a step costs on this device with this model: a roofline, times what passes of that shape were measured to differ
from it, times what everything here costs more than it did lately. Owns no clock and no file.

Three speeds of learning, so that each cause finds its place: the drift moves within some dozens of steps and is one
factor for everything; a shape's difference moves with its first measurements and slowly afterwards; the roofline is
fitted again ever more rarely, and only moves what no measurement is near to.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from policies.calibration.document import FEW, MOST, Calibration, CalibrationKey, DraftCost, PassCost
from policies.calibration.drafts import DraftCosts, Typical
from policies.calibration.roofline import MeasuredPass, Roofline, fit_roofline
from policies.speculation.policy import StepKind, StepOutcome
from policies.speculation.strategy import Strategy

_CLIP = 0.25  # of a logarithm: what a step that was interrupted counts at most
_DRIFT_GAIN = 1 / 16
_SETTLED = 64  # measurements of a shape after which it moves by 1 / so many of a surprise; before, by 1 / measurements
_EXACT_ROWS = 16  # processors compute 1, 2, 4, 8, 16 rows by different code; beyond, eight shapes an octave
_NEAR, _ACROSS = 0.08, 0.3  # in logarithms of rows: a shape so far away says half; requests count for so much of rows
_ALONE = 0.2  # of a logarithm: a single time so far from the roofline counts for half
_DOUBT = 0.05  # weight of no difference from the roofline, against 1 of a measurement of the very shape
_PROMPT_SURE = 0.3  # a step with prompt rows says so much: it is often the first of its kind, and draws fewer tokens
_KNOWN = 64  # observations after which a shape that was not measured before may say that everything takes longer
_FIRST_FIT, _LAST_FIT = 4, 4096  # observations to the first fit, and at most between two


@dataclass(slots=True)
class _Shape:
    """Passes of about as many rows and requests."""

    requests: int
    rows: int
    context_tokens: float
    usual: Typical = field(default_factory=Typical)  # logarithms of seconds over roofline and drift
    sure: float = 1.0


class CostModel:
    """Of one engine. Right from the first step with a calibration; without, from the first measurements."""

    def __init__(self, calibration: Calibration | None = None) -> None:
        self._roofline: Roofline | None = None
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._drafts = DraftCosts()
        self._switches: dict[str, Typical] = {}
        self._drift = 0.0  # logarithm
        self._factor = 1.0  # its exponential
        self._seen, self._fit_at = 0, _FIRST_FIT
        self._steps: dict[tuple[int, int, int], float] = {}  # without drift
        self._differences: dict[tuple[int, int], float] = {}
        self._calibrated = False
        self._near: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None
        if calibration is not None:
            self._start(calibration)

    def _start(self, calibration: Calibration) -> None:
        measured = [one.measured for one in calibration.passes]
        self._roofline = calibration.fitted or (fit_roofline(measured) if measured else None)
        for one in calibration.passes:
            assert self._roofline is not None
            shape = self._shape(one.requests, one.rows, one.context_tokens)
            usual = self._roofline.seconds(one.requests, one.rows, one.context_tokens)
            # Several contexts of one shape: their mean, which the roofline then carries to other contexts.
            total = shape.usual.count + one.count
            shape.usual.value += (math.log(one.seconds / usual) - shape.usual.value) * one.count / total
            shape.context_tokens += (one.context_tokens - shape.context_tokens) * one.count / total
            shape.usual.count = total
        for shape in self._shapes.values():
            shape.usual.settle(_SETTLED)
        self._calibrated = bool(calibration.passes)
        for draft in calibration.drafts:
            self._drafts.add(Strategy.parse(draft.strategy), draft.requests, draft.seconds, max(draft.count, 2))
        self._fit_at = _LAST_FIT

    @property
    def drift(self) -> float:
        """By how much steps lately took longer than the model says of this machine: 1.0 is none, 1.5 half as long
        again. Predictions have it in them."""
        return self._factor

    def step_s(self, requests: int, rows: int, context_tokens: int) -> float | None:
        """Seconds of an engine step that computes `rows` rows for `requests` >= 1 requests, without its drafting; None
        before anything is known. context_tokens: of all requests together."""
        shift = max(context_tokens.bit_length() - 4, 0)
        key = requests, rows, context_tokens >> shift << shift
        try:
            return self._steps[key] * self._factor
        except KeyError:
            if self._roofline is None:
                return None
            usual = self._roofline.seconds(*key) * math.exp(self._difference(requests, rows))
            self._steps[key] = usual
            return usual * self._factor

    def draft_s(self, strategy: Strategy, requests: int) -> float | None:
        """Seconds of drafting so for `requests` >= 1 requests; 0.0 of plain decoding; None: neither calibrated nor
        measured."""
        if strategy.depth == 0:
            return 0.0
        seconds = self._drafts.at(strategy, requests)
        return None if seconds is None else seconds * self._factor

    def switch_s(self, drafter: str) -> float | None:
        """Seconds that the drafter's first step takes beyond its usual ones, after others drafted; None: not seen."""
        switch = self._switches.get(drafter)
        return None if switch is None else math.exp(switch.value) * self._factor

    def expected_s(self, outcome: StepOutcome) -> float | None:
        """Seconds that the step should have taken, with the rows it had and what it drafted with; None: not known."""
        load = outcome.load
        step_s = self.step_s(load.running, outcome.rows, load.context_tokens)
        draft_s = self.draft_s(outcome.strategy, load.running)
        return None if step_s is None or draft_s is None else step_s + draft_s

    def observe(self, outcome: StepOutcome) -> None:
        """A step of any kind. About 2 us, and a fit of a millisecond after 4, 8, 16 ... steps."""
        kind, prompt = outcome.kind, outcome.prompt_tokens
        if kind is StepKind.DISTURBED and not prompt:
            return  # new weights, a captured graph: no pass
        load, strategy = outcome.load, outcome.strategy
        requests, rows = load.running, outcome.rows
        seconds = outcome.elapsed_s - outcome.draft_s
        if seconds <= 0.0:
            return  # a coarse clock
        usual = kind is StepKind.USUAL
        self._pass(requests, rows, load.context_tokens, seconds, usual or kind is StepKind.CAUGHT_UP)
        if strategy.depth == 0 or outcome.draft_s <= 0.0:
            return
        if usual:
            self._drafts.add(strategy, requests, outcome.draft_s / self._factor)
        elif kind is StepKind.CAUGHT_UP:
            known = self._drafts.at(strategy, requests) or 0.0
            late_s = max(outcome.draft_s / self._factor - known, 1e-7)
            self._switches.setdefault(strategy.drafter, Typical()).add(math.log(late_s))

    def refined(self, key: CalibrationKey) -> Calibration:
        """What to keep for the next run: everything measured, without the drift of this one."""
        roofline, passes = self._roofline, []
        if roofline is not None:
            for shape in self._shapes.values():
                if shape.usual.count:
                    context = round(shape.context_tokens)
                    seconds = roofline.seconds(shape.requests, shape.rows, context) * math.exp(shape.usual.value)
                    count = max(round(shape.sure * min(shape.usual.count, MOST)), 1)
                    passes.append(
                        PassCost(
                            requests=shape.requests,
                            rows=shape.rows,
                            context_tokens=context,
                            seconds=seconds,
                            count=count,
                        )
                    )
        drafts = tuple(
            DraftCost(strategy=str(strategy), requests=requests, seconds=seconds, count=min(count, MOST))
            for strategy, requests, seconds, count in self._drafts.measured()
        )
        return Calibration(key=key, passes=tuple(passes), drafts=drafts, fitted=roofline)

    def _shape(self, requests: int, rows: int, context_tokens: int) -> _Shape:
        by_rows = rows if rows <= _EXACT_ROWS else _EXACT_ROWS + round(8 * math.log2(rows / _EXACT_ROWS))
        key = by_rows, requests if requests <= 4 else 4 + round(2 * math.log2(requests / 4))
        try:
            return self._shapes[key]
        except KeyError:
            shape = self._shapes[key] = _Shape(requests, rows, float(context_tokens))
            self._forget()
            return shape

    def _pass(self, requests: int, rows: int, context_tokens: int, seconds: float, sure: bool) -> None:
        self._seen += 1
        if self._roofline is None:
            self._roofline = fit_roofline([MeasuredPass(requests, rows, context_tokens, seconds)])
        shape = self._shape(requests, rows, context_tokens)
        usual, count = shape.usual, shape.usual.count
        over = math.log(seconds / self._roofline.seconds(requests, rows, context_tokens)) - self._drift
        if count < FEW:
            if sure and (self._calibrated or self._seen > _KNOWN):
                self._drifts(over - self._difference(requests, rows))
            if not count:
                shape.sure = 1.0 if sure else _PROMPT_SURE
            elif sure and shape.sure < 1.0:  # what prompts said of it is past
                shape.usual, shape.sure = Typical(), 1.0
            shape.usual.add(over)
            self._forget()
        elif sure:
            surprise = self._drifts(over - usual.value)
            usual.count = count + 1
            usual.value += surprise / min(usual.count, _SETTLED)
            if not usual.count & 63:
                self._forget()
        shape.context_tokens += (context_tokens - shape.context_tokens) / min(count + 1, _SETTLED)
        if self._seen >= self._fit_at:
            self._fit()

    def _drifts(self, over: float) -> float:
        """A step took so much more than predicted, as a logarithm. Returns what of it counts."""
        surprise = min(max(over, -_CLIP), _CLIP)
        self._drift += surprise * _DRIFT_GAIN
        self._factor = math.exp(self._drift)
        return surprise

    def _fit(self) -> None:
        """The roofline anew; what shapes were measured to take stays."""
        self._fit_at = self._seen + min(self._seen, _LAST_FIT)
        before = self._roofline
        assert before is not None
        shapes = [shape for shape in self._shapes.values() if shape.usual.count]
        took = [
            before.seconds(shape.requests, shape.rows, round(shape.context_tokens)) * math.exp(shape.usual.value)
            for shape in shapes
        ]
        after = fit_roofline(
            [
                MeasuredPass(
                    shape.requests,
                    shape.rows,
                    round(shape.context_tokens),
                    seconds,
                    shape.sure * min(shape.usual.count, FEW) / FEW,
                )
                for shape, seconds in zip(shapes, took, strict=True)
            ],
            before.pair_s,
        )
        for shape, seconds in zip(shapes, took, strict=True):
            context = round(shape.context_tokens)
            shape.usual.move_to(math.log(seconds / after.seconds(shape.requests, shape.rows, context)))
        self._roofline = after
        self._forget()

    def _forget(self) -> None:
        self._steps.clear()
        self._differences.clear()
        self._near = None

    def _difference(self, requests: int, rows: int) -> float:
        """Logarithm by which passes near that shape were measured to differ from the roofline."""
        key = requests, rows
        if key not in self._differences:
            if self._near is None:
                shapes = [shape for shape in self._shapes.values() if shape.usual.count]
                self._near = (
                    np.log([shape.rows for shape in shapes]),
                    np.log([shape.requests for shape in shapes]),
                    np.array([shape.usual.value for shape in shapes]),
                    np.array([_weight(shape) for shape in shapes]),
                )
            by_rows, by_requests, values, sure = self._near
            far = (by_rows - math.log(rows)) ** 2 + (_ACROSS * (by_requests - math.log(requests))) ** 2
            weights = sure / (1 + far / _NEAR**2)
            self._differences[key] = float((weights * values).sum() / (weights.sum() + _DOUBT))
        return self._differences[key]


def _weight(shape: _Shape) -> float:
    """Of what was measured, 1 at most. A single time far from the roofline may be one that was interrupted."""
    count, value = shape.usual.count, shape.usual.value
    return shape.sure * (min(count, FEW) / FEW if count > 1 else 1 / FEW / (1 + (value / _ALONE) ** 2))
