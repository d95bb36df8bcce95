"""A robust running mean of measurements."""

import math
from dataclasses import dataclass, field

from policies.calibration.document import FEW

_GAIN = 1 / 12  # by which a later one moves the logarithm
_APART = 0.7  # of a logarithm: what is further off is another state of the machine ...
_ABOVE = 32  # ... and taken for the usual one after so many in a row; cheaper ones after a few


@dataclass(slots=True)
class Typical:
    """Of logarithms: of the first few the lower median; later a slow walk to the logarithm of the mean. What is twice
    as much or half is left out until it lasts: a burst that disturbs the machine would raise the price of a drafter
    that is not asked afterwards. A price that fell is believed soon, for it is tried and shows itself."""

    value: float = 0.0
    count: int = 0
    first: list[float] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)  # those left out, since one was not; on one side

    def add(self, logarithm: float) -> None:
        self.count += 1
        if self.count <= FEW:
            self.first.append(logarithm)
            self.value = sorted(self.first)[(len(self.first) - 1) // 2]
            return
        surprise = logarithm - self.value
        if abs(surprise) <= _APART:
            self.value += _GAIN * (math.exp(surprise) - 1)
            self.apart.clear()
            return
        if self.apart and (self.apart[0] > self.value) != (surprise > 0):
            self.apart.clear()
        self.apart.append(logarithm)
        if len(self.apart) >= (_ABOVE if surprise > 0 else FEW):
            self.value = sorted(self.apart)[(len(self.apart) - 1) // 2]
            self.apart.clear()

    def settle(self, count: int) -> None:
        """Take it as known from before. If it has more than a few measurements, it counts as sure as
        `count` of them."""
        if self.count >= FEW:
            self.count, self.first = max(self.count, count), []
        else:
            self.first = [self.value] * self.count

    def move_to(self, value: float) -> None:
        """Set the value relative to another reference."""
        self.first = [one + value - self.value for one in self.first]
        self.apart = [one + value - self.value for one in self.apart]
        self.value = value
