"""The operators `paceline::*`: Triton kernels of the engine's computation on CUDA, without gradients.

`operators` defines them, with the oracle (`models.ops.reference`) as the CPU implementation and shapes alone on meta
tensors. Kernels are imported at the first launch, so a machine without launches never imports Triton. No operator reads
a length on the host, and none reads one row to compute another.
"""

from models.ops.triton.operators import LAUNCHES, operators_take

__all__ = ["LAUNCHES", "operators_take"]
