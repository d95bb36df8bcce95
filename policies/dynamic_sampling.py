"""Dynamic sampling: how many more prompts an RL step samples until enough groups have signal. Owns the rule.

Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, section 3.2 and eq. 11. It depends on rewards only, never on time or
speed, so a step requests the same prompts wherever it runs.
"""

from collections.abc import Sequence

from policies.advantages import has_zero_variance


def has_signal(rewards: Sequence[float], trainable: int) -> bool:
    """Whether a group counts: two different rewards as graded, and at least one response that trains.

    `rewards`: unshaped. DAPO's condition is on right and wrong answers, and length shaping alone would let groups pass
    that it must filter out. `trainable`: responses that carry a gradient (not those that `mask_truncated` leaves out).
    """
    return trainable > 0 and len(rewards) > 1 and not has_zero_variance(rewards)


def prompts_to_sample(wanted: int, found: int, sampled: int) -> int:
    """Return the prompts of the next round: enough for the missing groups if the share of groups with signal stays that
    of this RL step. At most `wanted`; 0 if nothing is missing.

    DAPO samples a whole batch again in every round. Here a nearly complete step requests few prompts, so that fewer
    tokens are drawn for unneeded groups.
    """
    missing = wanted - found
    if missing <= 0:
        return 0
    return min(wanted, -(-missing * sampled // found)) if found else wanted
