"""A robust mean of what is measured one after the other."""

import math
from dataclasses import dataclass, field

from policies.calibration.document import FEW

_GAIN = 1 / 12  # by which a later one moves the logarithm
_MOST = 4.0  # times as much as is usual: what one that was interrupted counts at most


@dataclass(slots=True)
class Typical:
    """Of logarithms: of the first few the lower median; later a slow walk to the logarithm of the mean, since a cost
    with a long tail costs its mean, on which no outlier carries far."""

    value: float = 0.0
    count: int = 0
    first: list[float] = field(default_factory=list)

    def add(self, logarithm: float) -> None:
        self.count += 1
        if self.count <= FEW:
            self.first.append(logarithm)
            self.value = sorted(self.first)[(len(self.first) - 1) // 2]
        else:
            self.value += _GAIN * (min(math.exp(logarithm - self.value), _MOST) - 1)

    def settle(self, count: int) -> None:
        """Known from before: if from more than a few, as surely as by `count`."""
        if self.count >= FEW:
            self.count, self.first = max(self.count, count), []
        else:
            self.first = [self.value] * self.count

    def move_to(self, value: float) -> None:
        """Measured against something else."""
        self.first = [one + value - self.value for one in self.first]
        self.value = value
