"""Products with a weight and its low-rank update: the merge, bitwise equal in learner and engines, and the gradients of
the update's two factors.

The product uses the merged matrix W + scale B A, rounded once to the dtype of W, as an engine with merged weights does.
The merged matrix is not stored. The CPU's kernel merges a few columns of the product at a time, where it uses them. The
gradient in x takes W and the update apart, (dy W) + scale (dy B) A, without the rounding of the merge. No gradient is
as large as W.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.low_bit import LowBitWeight, dequantise
from models.ops.low_bit import low_bit_linear, tokens_of
from models.ops.matmul import linear
from models.ops.native import kernels, operand, product_dtype, takes

# A row of the kernels' table of updates (native/kernels.h).
_UPDATE = np.dtype([("a", "u8"), ("b", "u8"), ("start", "i8"), ("stop", "i8"), ("rank", "i8"), ("scale", "f8")])


class LowRank(NamedTuple):
    """The update scale * b @ a of rows [start, stop) of a weight [N, K]."""

    a: Tensor  # float32 [r, K]
    b: Tensor  # float32 [stop - start, r]
    scale: float
    start: int
    stop: int


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return weight [N, K] + scale * b [N, r] @ a [r, K]: summed in float32, rounded once to the dtype of weight.

    On the CPU bitwise the same for any number of threads, and for rows alone or in a batch.
    """
    if _supported(weight, [whole := LowRank(a, b, scale, 0, len(weight))]):
        return merge_rows(weight, [whole])
    update = linear(b.detach(), a.detach().t().contiguous(), None, invariant=b.is_cpu)
    return update.mul_(scale).add_(weight.detach()).to(weight.dtype)


def merge_rows(weight: Tensor, updates: Sequence[LowRank]) -> Tensor:
    """Return a copy of weight [N, K] with every update merged into its rows, which do not overlap."""
    if not _supported(weight, updates):
        merged = weight.detach().clone()
        for update in updates:
            rows = slice(update.start, update.stop)
            merged[rows] = merge(weight[rows], update.a, update.b, update.scale)
        return merged
    weight = weight.detach().contiguous()
    merged, (table, _factors) = torch.empty_like(weight), _table(weight, updates)
    kernels.merge_rows(  # type: ignore[union-attr]
        weight.dtype is torch.bfloat16,
        weight.data_ptr(),
        table.ctypes.data,
        len(table),
        merged.data_ptr(),
        *weight.shape,
        torch.get_num_threads(),
    )
    return merged


def _supported(weight: Tensor, updates: Sequence[LowRank]) -> bool:
    """Return whether the CPU's kernels can merge these (older builds of the extension cannot)."""
    if not takes(weight) or not hasattr(kernels, "merge_rows"):
        return False
    return all(takes(update.a, update.b) and update.a.dtype is torch.float32 for update in updates)


def _table(weight: Tensor, updates: Sequence[LowRank]) -> tuple[NDArray[np.void], list[Tensor]]:
    """Return the updates as the kernels take them, and the factors that must stay alive. Raises ValueError."""
    table, factors = np.zeros(len(updates), _UPDATE), list[Tensor]()
    for row, (a, b, scale, start, stop) in enumerate(updates):
        rank, (rows, depth) = a.shape[0], weight.shape
        if a.shape != (rank, depth) or b.shape != (stop - start, rank) or not 0 <= start <= stop <= rows:
            raise ValueError(
                f"a {list(a.shape)}, b {list(b.shape)}: no update of rows {start} to {stop} of {rows, depth}"
            )
        factors += [a.detach().contiguous(), b.detach().contiguous()]
        table[row] = (factors[-2].data_ptr(), factors[-1].data_ptr(), start, stop, rank, scale)
    return table, factors


def adapted_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    updates: Sequence[LowRank],
    *,
    invariant: bool,
    low_bit: LowBitWeight | None = None,
    bf16_gradients: bool = False,
) -> Tensor:
    """Return x [T, K] times the merged weight [N, K]^T plus bias, [T, N]; differentiable in x and the updates' a and b.

    `bf16_gradients`: the backward multiplies in bfloat16 if the CPU has instructions for it: the gradient, x, the
    weight and the factors are rounded to it, and so is each product. Products are summed in float32. No effect on
    other CPUs. There float32 multiplies the gradients of bfloat16 weights, too.
    `low_bit`: the merged weight as engines store it. The product is then the engine's, and gradients use
    straight-through estimation of both roundings (`mirrored_linear`)."""
    factors = [factor for update in updates for factor in (update.a, update.b)]
    result: Tensor = _Adapted.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, updates, invariant, low_bit, bf16_gradients, *factors
    )
    return result


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        updates: Sequence[LowRank],
        invariant: bool,
        low_bit: LowBitWeight | None,
        bf16_gradients: bool,
        *factors: Tensor,
    ) -> Tensor:
        ctx.places = [(update.scale, update.start, update.stop) for update in updates]
        ctx.low_bit, ctx.dtype = low_bit, x.dtype
        ctx.bf16_gradients = bf16_gradients
        if low_bit is None:
            ctx.save_for_backward(weight, *factors, x)
            fits = takes(x, weight) and (bias is None or takes(x, bias)) and _supported(weight, updates)
            if invariant and fits:
                return _product(x, weight, bias, updates)
            return linear(x, merge_rows(weight, updates), bias, invariant=invariant)
        ctx.save_for_backward(weight, *factors, *tokens_of(x, low_bit.format))
        return low_bit_linear(x, low_bit, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *rest = ctx.saved_tensors
        count = 2 * len(ctx.places)
        factors, saved = rest[:count], rest[count:]
        x = saved[0] if len(saved) == 1 else saved[0].float().mul_(saved[1]).to(ctx.dtype)
        updates = [LowRank(a, b, *place) for a, b, place in zip(factors[0::2], factors[1::2], ctx.places, strict=True)]
        ranks = [len(update.a) for update in updates]
        if grad.is_cpu:
            dtype = product_dtype(torch.bfloat16 if ctx.bf16_gradients else grad.dtype)
            grad, x = grad.to(dtype), x.to(dtype)
        a = torch.cat([update.a for update in updates]).to(grad.dtype)  # all updates in one product each
        rows = [grad[:, update.start : update.stop] for update in updates]
        inner = torch.cat(
            [(part @ u.b.to(grad.dtype)).mul_(u.scale) for part, u in zip(rows, updates, strict=True)], dim=1
        )
        grad_x = None
        if ctx.needs_input_grad[0]:
            frozen = weight if ctx.low_bit is None else dequantise(ctx.low_bit)
            wide = torch.promote_types(grad.dtype, ctx.dtype)  # rounded twice, every layer would add an error
            grad_x = (grad @ frozen.to(grad.dtype)).to(wide)
            if ctx.low_bit is None:
                grad_x.addmm_(inner.to(wide), a.to(wide))
            grad_x = grad_x.to(ctx.dtype)
        for_a = (inner.t() @ x).float().split(ranks)
        outer = (x @ a.t()).split(ranks, dim=1)
        grads: list[Tensor] = []
        for update, part, inputs, first in zip(updates, rows, outer, for_a, strict=True):
            grads += [first, (part.t() @ inputs).float().mul_(update.scale)]
        return grad_x, None, None, None, None, None, None, *grads


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, updates: Sequence[LowRank]) -> Tensor:
    """Return x [T, K] times the merged weight [N, K]^T plus bias: bitwise `linear` of `merge_rows`, invariant."""
    weight = weight.detach().contiguous()
    (columns, depth), (table, _factors) = weight.shape, _table(weight, updates)
    x = operand(x, columns, depth, bias)
    out = x.new_empty((x.shape[0], columns))
    kernels.adapted_linear(  # type: ignore[union-attr]
        x.dtype is torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        table.ctypes.data,
        len(table),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        columns,
        depth,
        torch.get_num_threads(),
    )
    return out
