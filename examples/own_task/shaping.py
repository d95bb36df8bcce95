"""Rewards that read tokens, or the whole group, to copy from: DAPO's overlong shaping, and concise right answers."""

from typing import Any

from examples.own_task.reward import grade


def overlong(tokens: list[int], *, limit: int, buffer: int) -> float:
    """Return a penalty in [-1, 0], to be added to another term: 0 up to `limit - buffer` tokens, then down to -1 at
    `limit` (Yu et al. 2025, DAPO, eq. 13). `limit` is rollout.sampling.max_new_tokens."""
    return -max(0.0, min(1.0, (len(tokens) - (limit - buffer)) / buffer))


def concise(prompt: str, sample: int, record: dict[str, Any], group: list[dict[str, Any]]) -> float:
    """Return the share of the group's right responses that are longer than this one, in [0, 1]; 0 if it is wrong or
    cut."""
    right = {
        other["sample"]: len(other["tokens"])
        for other in group
        if other["finish_reason"] == "stop" and grade(prompt, other["response"], record) == 1.0
    }
    own = right.pop(sample, None)
    return 0.0 if own is None or not right else sum(length > own for length in right.values()) / len(right)
