"""Group-relative advantages (GRPO). Owns the formula and the report of groups that teach nothing.

Pure numpy on the driver; never drops a group itself: the driver does, and counts it (`groups/zero_variance`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6  # added to the std: keeps the quotient finite; relative change of an advantage: EPSILON / std
TIE = 1e-9  # rewards closer than this, relative to max(1, |reward|), are equal: their spread is rounding, not signal


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of one group (the responses to one prompt), in the order of the rewards."""

    advantages: NDArray[np.float64]  # [n]; all zero if zero_variance
    mean: float
    std: float  # with n - 1 in the denominator; 0 for one response
    zero_variance: bool  # all rewards equal (or only one): no gradient


def group_advantages(rewards: Sequence[float], *, normalize_std: bool, epsilon: float = EPSILON) -> GroupAdvantages:
    """A_i = r_i - mean(r), divided by (std(r) + epsilon) if `normalize_std`.

    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2, outcome supervision; without the division it is Dr. GRPO's
    (Liu et al. 2025). The std has n - 1 in the denominator, as in TRL and verl.

    Raises ValueError for an empty group and for a reward that is not finite (naming its index).
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"a group needs at least one reward, in one dimension; got shape {values.shape}")
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"reward {index} of the group is {values[index]}; rewards must be finite")
    mean = float(values.mean())
    zero_variance = bool(np.ptp(values) <= TIE * max(1.0, float(np.abs(values).max())))
    if zero_variance:
        return GroupAdvantages(np.zeros_like(values), mean, 0.0, True)
    std = float(values.std(ddof=1))
    advantages = values - mean
    return GroupAdvantages(advantages / (std + epsilon) if normalize_std else advantages, mean, std, False)
