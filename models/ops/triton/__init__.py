"""The operators `paceline::*`: what the engine computes on CUDA without gradient, as Triton kernels.

`operators` defines them, with the oracle (`models.ops.reference`) as their CPU implementation and shapes alone on meta
tensors; the kernels beside it are imported at the first launch. Nothing here imports Triton on a machine that launches
nothing, and no operator reads a length on the host or looks at a row to compute another.
"""

from models.ops.triton.operators import LAUNCHES, operators_take

__all__ = ["LAUNCHES", "operators_take"]
