"""Finished rollouts on their way from the driver to the workers that did not make them: one object in the store.

Owns the packing; knows nothing of drafters, which learn from them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from actors.engine.types import IntArray


@dataclass(frozen=True, slots=True)
class SharedRollouts:
    """N rollouts, each as its prompt and its response, one behind the other."""

    tokens: IntArray  # [T]
    prompt_lengths: IntArray  # [N]
    response_lengths: IntArray  # [N]
    made_by: IntArray  # [N], index of the worker that sampled it

    @classmethod
    def pack(cls, rollouts: Iterable[tuple[IntArray, IntArray, int]]) -> "SharedRollouts":
        """From (prompt tokens, response tokens, worker) of each."""
        prompts, responses, made_by = zip(*rollouts, strict=True)
        parts = [part for pair in zip(prompts, responses, strict=True) for part in pair]
        return cls(
            np.concatenate(parts).astype(np.int32),
            np.array([len(prompt) for prompt in prompts], np.int32),
            np.array([len(response) for response in responses], np.int32),
            np.array(made_by, np.int32),
        )

    def not_from(self, worker: int) -> tuple[list[IntArray], list[IntArray]]:
        """Prompts and responses that `worker` did not sample; views of `tokens`."""
        starts = np.concatenate([[0], np.cumsum(self.prompt_lengths + self.response_lengths)])
        prompts, responses = [], []
        for i in np.flatnonzero(self.made_by != worker):
            middle = starts[i] + self.prompt_lengths[i]
            prompts.append(self.tokens[starts[i] : middle])
            responses.append(self.tokens[middle : starts[i + 1]])
        return prompts, responses
