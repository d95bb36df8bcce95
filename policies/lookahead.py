"""Decides from measured seconds whether to look ahead in the next RL step, and how far. Pure.

Sampling early is free on a worker that would be idle. Checking the text takes time in the RL step that uses it: it pays
while (accepted share) x (seconds to decode it) > (seconds to check it). Engines measure both sides step by step
(`contracts.rollout.EarlyUse.saved_s`), and the driver measures its own seconds. After a loss nothing is sampled ahead
until SHARE of the RL steps' time has covered it. Then a probe of few prompts measures again.
"""

from dataclasses import dataclass, field
from enum import StrEnum

SHARE = 0.02  # of engines' and driver's time that looking ahead may lose
PROBE = 1 / 8  # of an RL step's prompts
_PAST = 0.7  # of what was won before, per RL step: the weights move on
_FIRST_PAUSE = 4  # RL steps
_LONGEST_PAUSE = 64


class Extent(StrEnum):
    """How many prompts of the next RL step are sampled ahead."""

    ALL = "all"
    PROBE = "probe"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyGain:
    """Costs and gains of one RL step, over all engines and the driver."""

    checked: int  # early tokens
    won_s: float  # decoding seconds of the tokens that checks brought, less those of the checks; below 0: lost
    own_s: float  # that the driver spent on it
    all_s: float  # the RL step, times the workers

    @property
    def net_s(self) -> float:
        return self.won_s - self.own_s


@dataclass(slots=True)
class Worth:
    """Choice of the next RL step's `extent`. Call `observe` once per RL step.

    It begins with ALL. Where a text is checked, its loss is bounded (`actors.engine.batch.early.MISSES`)."""

    extent: Extent = Extent.ALL
    won_s: float = 0.0  # decayed sum
    owed_s: float = 0.0  # lost and not yet paid back
    _pause: int = _FIRST_PAUSE
    _left: int = field(default=0)

    def observe(self, measured: EarlyGain) -> str:
        """Add an RL step. Return why the extent changed, or "" if it did not."""
        before = self.extent
        self.owed_s = max(self.owed_s - SHARE * measured.all_s, 0.0)
        if self.extent is Extent.NONE:
            self.owed_s += max(-measured.net_s, 0.0)  # of text that was sampled before
            self._left = max(self._left - 1, 0)
            if not self._left and not self.owed_s:
                self.extent = Extent.PROBE
                return "a probe: what was lost is paid back"
            return ""
        self.won_s = min(self.won_s, _PAST * self.won_s) + measured.net_s
        if not measured.checked and self.won_s >= -SHARE * measured.all_s:
            return ""  # what was spent comes to be judged with the text that it brought
        if self.won_s < 0.0:
            self.owed_s -= self.won_s
            lost = f"{-measured.net_s:.2g} s of {measured.all_s:.3g} s were lost"
            self.won_s, self.extent, self._left = 0.0, Extent.NONE, self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            return f"stopped for {self._left} RL steps at least: {lost}"
        self.extent, self._pause = Extent.ALL, _FIRST_PAUSE
        return "" if self.extent is before else f"on again: the probe won {measured.net_s:.2g} s"
