"""Gives the idle seconds of an RL step to early samples or to the drafter's trainer. Pure.

The run measures the value of each per idle second:
- early samples: decoding seconds won by checks, per second of sampling early (`policies.lookahead`);
- training: seconds saved by the trained drafter, times the gain in acceptance over an RL step without training, times
  LASTS, per second of micro-steps. A gain is assumed to last for LASTS RL steps.
Acceptance is compared strategy by strategy (`policies.drafter.acceptance`). An unknown value is measured first. The
loser is tried again after REVISIT RL steps.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from policies.drafter.acceptance import AcceptanceTally
from policies.drafter.payoff import LASTS

REVISIT = 8  # RL steps
_PAST = 0.7  # of what was measured before, per RL step
_MOST = 1.0  # relative gain of one RL step: a drafter that nobody used before has no level to compare with


class Turn(StrEnum):
    """The use of an RL step's idle seconds."""

    LOOK = "look"
    TRAIN = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleUse:
    """Idle seconds of one RL step, over all workers."""

    looked_s: float  # sampling early
    won_s: float  # by checks of the text of the RL step before; below 0: lost
    trained_s: float  # in micro-steps
    saved_s: float  # by drafts of the trained drafter
    acceptance: AcceptanceTally  # of the trained drafter


@dataclass(slots=True, kw_only=True)
class IdleTime:
    """Choice of the next RL step's use, `turn`. Call `observe` once per RL step."""

    turn: Turn = Turn.LOOK
    _won_s: float = 0.0  # decayed sums, as all below
    _looked_s: float = 0.0
    _gained_s: float = 0.0  # per RL step, by training before it
    _trained_s: float = 0.0
    _kept: float = 0.0  # gains of RL steps without training before them: below 0, a drafter that ages
    _untrained: float = 0.0  # their number
    _since: int = 0  # RL steps since the other had its turn
    _last: IdleUse | None = field(default=None)
    _tried: bool = False  # a turn to look found no second for it

    @property
    def looking(self) -> float | None:
        """Seconds won per second of sampling early, 0 where no worker found a second for it; None: not measured."""
        if not self._looked_s:
            return 0.0 if self._tried else None
        return self._won_s / self._looked_s

    @property
    def training(self) -> float | None:
        """Seconds won per second of micro-steps; None: not measured."""
        return LASTS * self._gained_s / self._trained_s if self._trained_s else None

    def observe(self, use: IdleUse) -> None:
        """Add the idle seconds of an RL step, and what those of the step before brought."""
        last, self._last = self._last, use
        if last is not None and last.looked_s:
            self._won_s, self._looked_s = _PAST * self._won_s + use.won_s, _PAST * self._looked_s + last.looked_s
        if last is not None:
            self._learn(last, use)
        self._tried = self._tried or (self.turn is Turn.LOOK and not use.looked_s)
        self._since += 1
        best = self._best()
        if best is self.turn and self._since >= REVISIT:
            best = Turn.TRAIN if best is Turn.LOOK else Turn.LOOK
        if best is not self.turn:
            self.turn, self._since = best, 0

    def _learn(self, last: IdleUse, use: IdleUse) -> None:
        found = use.acceptance.against(last.acceptance)
        gain = 0.0 if found is None else min(found.level - 1.0, _MOST)
        if found is not None and abs(gain) <= found.error:  # chance
            gain = 0.0
        if not last.trained_s:
            self._kept, self._untrained = _PAST * self._kept + gain, _PAST * self._untrained + 1.0
            return
        fading = self._kept / self._untrained if self._untrained else 0.0
        self._gained_s = _PAST * self._gained_s + (gain - min(fading, 0.0)) * max(use.saved_s, 0.0)
        self._trained_s = _PAST * self._trained_s + last.trained_s

    def _best(self) -> Turn:
        looking, training = self.looking, self.training
        if looking is None or training is None:  # in turns, until both are known
            return Turn.TRAIN if self.turn is Turn.LOOK else Turn.LOOK
        if looking == training and not self._looked_s:
            return Turn.TRAIN
        return Turn.LOOK if looking >= training else Turn.TRAIN
