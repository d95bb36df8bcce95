"""Advantages of one's own, to copy from: rewards against the mean of their group, rare successes louder."""

import numpy as np
from numpy.typing import NDArray


def rare_successes(
    rewards: list[NDArray[np.float64]], lengths: list[NDArray[np.int64]], *, floor: float = 0.1
) -> list[NDArray[np.float64]]:
    """(r - mean) / max(mean, floor) for every group: of a prompt that is solved one time in eight, the one counts
    eight times as much as one of a prompt that is always solved. Rewards are in [0, 1]; lengths are in tokens.

    It runs on the driver, once per RL step, with all groups of the batch.
    """
    return [(group - group.mean()) / max(float(group.mean()), floor) for group in rewards]
