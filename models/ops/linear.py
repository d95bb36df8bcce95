"""Matrix products whose rows do not depend on the batch. Owns the padding rule and the weights packed for inference."""

import torch.nn.functional as F
from torch import Tensor

# Below this many rows (8 per thread, 2 threads) the BLAS picks other kernels or splits, and sums in another order.
INVARIANT_ROWS = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, invariant: bool) -> Tensor:
    """x [T, K] @ weight [N, K]^T + bias [N] -> [T, N], differentiable.

    invariant: row t of the result is bitwise the same whatever T and the other rows are.
    """
    rows = x.shape[0]
    if not invariant or rows >= INVARIANT_ROWS:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, INVARIANT_ROWS - rows)), weight, bias)[:rows]
