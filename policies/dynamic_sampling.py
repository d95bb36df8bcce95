"""Dynamic sampling: how many more prompts an RL step samples until enough of its groups can be learned from. Owns the
rule; never samples.

Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, section 3.2 and eq. 11. It decides on rewards only, never on a clock or
on who was fast, so that a step asks for the same prompts wherever it runs.
"""

from collections.abc import Sequence

from policies.advantages import has_zero_variance


def has_signal(rewards: Sequence[float], trainable: int) -> bool:
    """Whether a group counts: two different rewards as they were graded, and at least one of its responses trains.

    `rewards`: without any shaping: DAPO's condition is on right and wrong answers, and lengths alone would let pass
    what it is to sort out. `trainable`: responses that carry a gradient (not those that `mask_truncated` leaves out).
    """
    return trainable > 0 and len(rewards) > 1 and not has_zero_variance(rewards)


def prompts_to_sample(wanted: int, found: int, sampled: int) -> int:
    """Of the next round: as many as bring what is missing if the share of groups with signal stays what it was in this
    RL step; at most `wanted`, and 0 if nothing is missing.

    DAPO samples a whole batch again in every round. Here a nearly full step asks for a few prompts, so that fewer
    tokens are drawn for groups that nobody needs.
    """
    missing = wanted - found
    if missing <= 0:
        return 0
    return min(wanted, -(-missing * sampled // found)) if found else wanted
