"""Weights in eight bits: the arithmetic, and which tensors of a checkpoint it is for. Owns no file and no network.

The format is W8A8 int8 as `compressed-tensors` names it, which vLLM computes on CPUs and GPUs: weights symmetric with
one scale per output row, made here; activations symmetric with one scale per token, made while computing.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

LEVELS = 127  # -127 .. 127: symmetric, so that no zero point is needed and -w rounds to -q
SCALE_SUFFIX = "_scale"  # of the tensor that holds a quantised tensor's scales: NAME.weight, NAME.weight_scale
KEPT = ("embed_tokens.weight", "lm_head.weight")  # matrices that stay as they are: names that end so


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> int8 [N, K] and float32 scales [N, 1], so that weight is about values * scales.

    scale = max|row| / 127, value = round(weight / scale), halves to even, in float32. A row of zeros has scale 1.
    """
    exact = weight.float()
    scales = exact.abs().amax(1, keepdim=True) / LEVELS
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (exact / scales).round().clamp(-LEVELS, LEVELS).to(torch.int8), scales


def dequantise_rows(values: Tensor, scales: Tensor) -> Tensor:
    """int8 [N, K] and float32 [N, 1] -> float32 [N, K]."""
    return values.float() * scales


def quantised(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors with every matrix of its layers quantised, each followed by its scales."""
    for name, tensor in named:
        if tensor.dim() == 2 and name.endswith(".weight") and not name.endswith(KEPT):
            values, scales = quantise_rows(tensor)
            yield name, values
            yield name + SCALE_SUFFIX, scales
        else:
            yield name, tensor
