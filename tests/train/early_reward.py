"""A reward that a response's beginning decides, so that it may be stopped: for runs of an untrained network."""

from typing import Any


def early(prompt: str, response: str, record: dict[str, Any]) -> float:
    """1 if the text up to the first closed box, or of the first 16 characters, has an even sum."""
    box, _, _ = response.partition("}")
    return float(sum(box[:16].encode()) % 2 == 0)
