"""How much longer passes take now than when they were measured: all of them, and those with drafted rows beyond that.

Two logarithms, followed by a Kalman filter (Welch and Bishop 2006, equations 1.9 to 1.13): `both`, a random walk, and
`wide`, which returns to 0. A plain step shows `both`, a step with drafted rows their sum. With one drift for all,
drafted rows that cost more than was measured would make plain decoding look as slow: nobody measures it while all is
drafted. The filter knows what it cannot tell apart; `doubt` says when a plain step is worth its time.
"""

import math

NOISE = 0.2  # of one step's logarithm: standard deviation
_BOTH, _WIDE = 1 / 132, 2e-3  # variances per step, of NOISE squared: `both` settles at a gain of 1 / 12
_UNKNOWN = 4.0  # of each, of NOISE squared, where nothing was measured in this run; `wide` has no more later
_LIMIT = 2.0  # standard deviations of a surprise: what is interrupted counts no more


class Drift:
    """Starts without drift. Logarithms; variances are in NOISE squared."""

    def __init__(self, calibrated: bool) -> None:
        """`calibrated`: passes were measured in another run, where drafted rows may have been cheaper beside others."""
        self.both, self.wide = 0.0, 0.0
        self._of_both = self._of_wide = _UNKNOWN if calibrated else 0.0
        self._shared = 0.0

    @property
    def doubt(self) -> float:
        """The standard deviation of the logarithm by which plain steps and those with drafted rows differ."""
        return NOISE * math.sqrt(self._of_wide)

    def of(self, wide: bool) -> float:
        return self.both + self.wide if wide else self.both

    def add(self, surprise: float, wide: bool) -> None:
        """Add the logarithm of measured over predicted seconds of a step."""
        keep = 1 - _WIDE / (2 * _UNKNOWN)
        self.wide *= keep
        self._of_both, self._shared = self._of_both + _BOTH, self._shared * keep
        self._of_wide = self._of_wide * keep * keep + _WIDE
        by_both = self._of_both + (self._shared if wide else 0.0)
        by_wide = self._shared + (self._of_wide if wide else 0.0)
        variance = by_both + (by_wide if wide else 0.0) + 1.0
        limit = _LIMIT * NOISE * math.sqrt(variance)
        surprise = min(max(surprise, -limit), limit)
        self.both += surprise * by_both / variance
        self.wide += surprise * by_wide / variance
        self._of_both -= by_both * by_both / variance
        self._shared -= by_both * by_wide / variance
        self._of_wide -= by_wide * by_wide / variance
