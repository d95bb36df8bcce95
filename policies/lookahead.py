"""Whether looking ahead pays: by what engines measured of early text. Pure; the driver asks once per RL step.

Sampling early costs nothing where a worker would stand idle. Checking the text costs the step that it was made for: it
pays while (share that stands) x (seconds to decode it plainly) > (seconds to check it). Engines measure both sides step
by step (`contracts.rollout.EarlyUse.saved_s`), so that the sum over an RL step is what it won. After a step that lost,
a number of steps passes before it is tried again, twice as many after each loss in a row.
"""

from dataclasses import dataclass, field

_PAST = 0.7  # of what was won before, per RL step: the weights move on
_FIRST_PAUSE = 4  # RL steps
_LONGEST_PAUSE = 64


@dataclass(slots=True)
class Worth:
    """`observe` once per RL step; then `pays`."""

    won_s: float = 0.0  # decayed sum
    _pause: int = _FIRST_PAUSE
    _left: int = field(default=0)

    @property
    def pays(self) -> bool:
        """Look ahead from this RL step on. While nothing was measured, yes: idle seconds cost nothing."""
        return self._left == 0

    def observe(self, checked: int, won_s: float) -> None:
        """Of one RL step: early tokens that were checked, and seconds won (below 0: lost)."""
        if self._left:
            self._left -= 1
            return
        if not checked:
            return
        self.won_s = _PAST * self.won_s + won_s
        if self.won_s >= 0.0:
            self._pause = _FIRST_PAUSE
            return
        self.won_s, self._left = 0.0, self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
