"""Finished rollouts on their way from the driver to the engines that did not make them: one flat memory for all.

Owns the packing; knows nothing of drafters, which learn from them.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from contracts.rollout import IntArray


def pack(rollouts: Iterable[tuple[IntArray, IntArray, int]]) -> NDArray[np.uint8]:
    """From (prompt tokens, response tokens, index of the worker that sampled it) of each.

    Layout, int32: N; N prompt lengths; N response lengths; N workers; the tokens, each prompt before its response.
    """
    given = list(rollouts)
    lengths = [[len(prompt) for prompt, _, _ in given], [len(response) for _, response, _ in given]]
    head = np.array([len(given), *lengths[0], *lengths[1], *(made_by for _, _, made_by in given)], np.int32)
    tokens = [part.astype(np.int32, copy=False) for prompt, response, _ in given for part in (prompt, response)]
    return np.concatenate([head, *tokens]).view(np.uint8)


def unpack(memory: NDArray[np.uint8], without: int) -> tuple[list[IntArray], list[IntArray]]:
    """Prompts and responses that worker `without` did not sample; views of the memory."""
    values = memory.view(np.int32)
    n = int(values[0])
    prompt_lengths, response_lengths, made_by = values[1 : 1 + 3 * n].reshape(3, n)
    tokens = values[1 + 3 * n :]
    starts = np.concatenate([[0], np.cumsum(prompt_lengths + response_lengths, dtype=np.int64)])
    prompts, responses = [], []
    for i in np.flatnonzero(made_by != without):
        middle = starts[i] + prompt_lengths[i]
        prompts.append(tokens[starts[i] : middle])
        responses.append(tokens[middle : starts[i + 1]])
    return prompts, responses
