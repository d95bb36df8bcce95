"""The cost of an engine step on this device with this model: its pass plus its drafts, times a drift.

The drift is how much slower everything here runs now than when it was measured, and how much slower drafted rows do.
Owns it. Reads no clock and no file. It uses only the drafter and the depth of a strategy.

Three learning rates separate the causes. The drift moves within some dozens of steps. A well-measured shape of passes
moves slowly, and only by its own deviation, beyond what all recent steps have in common. The roofline below hardly
moves at all.
"""

import math

from config.strategy import Strategy
from policies.calibration.document import Calibration, CalibrationKey, DraftCost
from policies.calibration.drafts import DraftCosts
from policies.calibration.drift import Drift
from policies.calibration.passes import PassCosts, clipped
from policies.calibration.roofline import PROCESSOR, FreeRows
from policies.calibration.typical import Typical
from policies.steps import StepOutcome

_COMMON_GAIN = 1 / 8  # weight of a surprise in the recent ones' common part
# Steps are learned in batches of at most _TOGETHER. Of equal steps at most _LIKE are used, evenly spaced: a step of a
# small model takes little longer than learning from it. All are used if their mean surprise exceeds _SURPRISED, a
# logarithm.
_TOGETHER, _LIKE, _SURPRISED = 64, 4, 0.05


class CostModel:
    """The costs of one engine. With a calibration it is accurate from the first step; without, from the first
    measurements. Until then `free` estimates what more rows cost on such a device."""

    def __init__(self, calibration: Calibration | None = None, free: FreeRows = PROCESSOR) -> None:
        self._passes, self._drafts = PassCosts(calibration, free), DraftCosts(calibration)
        self.free_rows = free.rows  # of such a device, whatever was measured since
        self._switches: dict[str, Typical] = {}
        self._late: dict[str, tuple[Strategy, int, float]] = {}  # by drafter: a late draft seen before its usual ones
        self._drift = Drift(calibration is not None and bool(calibration.passes))
        self._factor = self._factor_wide = 1.0  # of plain steps; of passes with drafted rows, and of drafting
        self._common = 0.0  # common part of recent surprises, a logarithm
        self._steps: list[StepOutcome] = []  # not learned from yet

    @property
    def drift(self) -> float:
        """How much longer plain steps take than the model predicts for this machine: 1.0 is none, 1.5 is 50 % longer.
        Predictions include it."""
        self._learn()
        return self._factor

    @property
    def doubt(self) -> float:
        """The standard deviation of the logarithm of a plain step's seconds over those of a step with drafted rows."""
        return self._drift.doubt

    def step_s(self, requests: int, rows: int, context_tokens: int) -> float | None:
        """Return the seconds of an engine step that computes `rows` rows for `requests` >= 1 requests, without
        drafting. None before anything is known. context_tokens: of all requests together."""
        if self._steps:
            self._learn()
        return self.known_s(requests, rows, context_tokens)

    def known_s(self, requests: int, rows: int, context_tokens: int) -> float | None:
        """Return `step_s` without learning from pending observations: telemetry asks after every step."""
        seconds = self._passes.at(requests, rows, context_tokens)
        return None if seconds is None else seconds * self._of(requests, rows)

    def _of(self, requests: int, rows: int) -> float:
        return self._factor_wide if rows > requests else self._factor

    def most_s(self, requests: int, rows: int, context_tokens: int) -> float | None:
        """Return the seconds that such a step may take, without drafting: more than `step_s` where its like was hardly
        measured."""
        if self._steps:
            self._learn()
        seconds = self._passes.most(requests, rows, context_tokens)
        return None if seconds is None else seconds * self._of(requests, rows)

    def seen(self, requests: int, rows: int, times: int = 1) -> bool:
        """Whether such steps were measured so many times. Does not learn from pending observations."""
        return self._passes.seen(requests, rows, times)

    def draft_s(self, strategy: Strategy, requests: int) -> float | None:
        """Return the seconds of drafting for `requests` >= 1 requests; 0.0 for plain decoding; None if neither
        calibrated nor measured."""
        if strategy.depth == 0:
            return 0.0
        if self._steps:
            self._learn()
        seconds = self._drafts.at(strategy, requests)
        return None if seconds is None else seconds * self._factor_wide

    def most_draft_s(self, strategy: Strategy, requests: int) -> float | None:
        """Return the seconds that drafting may take: more than `draft_s` where that strategy was never measured."""
        if self._steps:
            self._learn()
        seconds = self._drafts.most(strategy, requests)
        return None if seconds is None else seconds * self._factor_wide

    def timed(self, drafter: str) -> int:
        """Usual steps of the drafter that were measured so far."""
        return self._drafts.timed(drafter)

    def switch_s(self, drafter: str) -> float | None:
        """Return the extra seconds of the drafter's first step after others drafted; None if not seen."""
        if self._steps:
            self._learn()
        switch = self._switches.get(drafter)
        return None if switch is None else math.exp(switch.value) * self._factor_wide

    def expected_s(self, step: StepOutcome) -> float | None:
        """Return the expected seconds of the step, given its rows and its drafts; None if unknown. Does not learn from
        pending observations."""
        load, strategy = step.load, step.strategy
        seconds = self.known_s(load.running, step.rows, load.context_tokens)
        if seconds is None or not strategy.depth:
            return seconds
        draft_s = self._drafts.at(strategy, load.running)
        return None if draft_s is None else seconds + draft_s * self._factor_wide

    def observe(self, step: StepOutcome) -> None:
        """Add a step of any kind. It is learned from before the next prediction."""
        self._steps.append(step)
        if len(self._steps) >= _TOGETHER:
            self._learn()

    def _learn(self) -> None:
        steps, self._steps = self._steps, []
        if len(steps) <= _LIKE:
            for step in steps:
                self._take(step)
            return
        alike: dict[tuple[int, int, int, bool], list[StepOutcome]] = {}
        for step in steps:
            key = id(step.strategy), step.load.running, step.rows, step.is_usual
            if key in alike:
                alike[key].append(step)
            else:
                alike[key] = [step]
        for some in alike.values():
            apart = max(len(some) // _LIKE, 1)
            surprises = [self._take(step) for step in some[::apart]]
            if apart > 1 and abs(sum(surprises)) > _SURPRISED * len(surprises):  # the machine has changed
                for i, step in enumerate(some):
                    if i % apart:
                        self._take(step)

    def _take(self, step: StepOutcome) -> float:
        """Learn from one step: some microseconds, plus a fit of about a millisecond after 4, 8, 16 ... steps. Returns
        how much longer than expected it took, as a logarithm."""
        load, rows = step.load, step.rows
        requests = max(load.running, 1)  # 0: prompts alone
        usual, late = step.is_usual, step.caught_up
        seconds = step.elapsed_s - step.draft_s
        if not (usual or late or step.prompt_tokens) or seconds <= 0.0:
            return 0.0  # new weights, a captured graph, or a coarse clock
        passes, sure = self._passes, usual or late
        context_tokens, common = load.context_tokens, self._common
        pass_s = seconds / self._of(requests, rows)
        surprise = passes.add(requests, rows, context_tokens, pass_s, sure=sure, common=common)
        if surprise:
            drift = self._drift
            drift.add(surprise, rows > requests)
            surprise = clipped(surprise)
            self._common += (surprise - common) * _COMMON_GAIN
            self._factor, self._factor_wide = math.exp(drift.of(False)), math.exp(drift.of(True))
        strategy, draft_s = step.strategy, step.draft_s / self._factor_wide
        if not strategy.depth or draft_s <= 0.0:
            return surprise
        if usual:
            self._drafts.add(strategy, requests, draft_s)
            if first := self._late.pop(strategy.drafter, None):
                self._switched(*first)
        elif late and self._drafts.at(strategy, requests) is None:
            self._late[strategy.drafter] = strategy, requests, draft_s
        elif late:
            self._switched(strategy, requests, draft_s)
        return surprise

    def _switched(self, strategy: Strategy, requests: int, draft_s: float) -> None:
        switch_s = max(draft_s - (self._drafts.at(strategy, requests) or 0.0), 1e-7)
        self._switches.setdefault(strategy.drafter, Typical()).add(math.log(switch_s))

    def refined(self, key: CalibrationKey) -> Calibration:
        """Return the calibration to keep for the next run: all measurements, without this run's drift."""
        self._learn()
        drafts: tuple[DraftCost, ...] = tuple(self._drafts.measured())
        return Calibration(key=key, passes=tuple(self._passes.measured()), drafts=drafts, fitted=self._passes.roofline)
