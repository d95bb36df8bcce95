"""Result type of a step's forward."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine.batch.step.types import Float32Array, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The target's draw at each of the N rows that are drawn from, in order. Arrays are valid until the next step."""

    tokens: Int64Array  # [N]
    logprobs: Float32Array  # [N], of the sampling distribution
    logprobs_t1: Float32Array  # [N], at temperature 1 without truncation
    rows: torch.Tensor  # [T, W] as in contracts.records, of all rows; never written again
    offsets: NDArray[np.int32]  # [R + 1], rows of the plan's requests
    captured: bool = False  # a graph was captured in this step: ignore its time


def nothing_drawn(rows: torch.Tensor, offsets: NDArray[np.int32], captured: bool = False) -> Draws:
    """Return the result of a step whose prompt chunks all end before their prompts do."""
    none = np.zeros(0, np.float32)
    return Draws(
        tokens=np.zeros(0, np.int64), logprobs=none, logprobs_t1=none, rows=rows, offsets=offsets, captured=captured
    )
