"""Finished rollouts, sent from the driver to the engines that did not make them: one memory for all.

Independent of the drafters that use them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contracts.codec import Codec, from_bytes, to_bytes
from contracts.rollout import IntArray


@dataclass(frozen=True, slots=True)
class SharedRollout:
    """One rollout. `made_by`: the index of the worker that sampled it."""

    prompt: IntArray
    response: IntArray
    made_by: int


_CODEC = Codec(SharedRollout)


def pack(rollouts: Iterable[tuple[IntArray, IntArray, int]]) -> NDArray[np.uint8]:
    """Pack rollouts of (prompt tokens, response tokens, index of the worker that sampled it)."""
    return to_bytes(_CODEC.pack([SharedRollout(*given) for given in rollouts]))


def unpack(memory: NDArray[np.uint8], without: int) -> tuple[list[IntArray], list[IntArray]]:
    """Return prompts and responses that worker `without` did not sample; views of the memory."""
    others = [rollout for rollout in _CODEC.unpack(from_bytes(memory)) if rollout.made_by != without]
    return [rollout.prompt for rollout in others], [rollout.response for rollout in others]
