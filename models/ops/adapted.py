"""Products with a weight and its low-rank update: the merge, bitwise equal in learner and engines, and the gradients of
the update's two factors.

The product uses the merged matrix W + scale B A, rounded once to the dtype of W, as an engine with merged weights does.
The merged matrix is not stored: it is computed again for the backward pass, at r / T of the product's flops for T
tokens and rank r. No gradient is as large as W.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.low_bit import LowBitWeight, dequantise
from models.ops.low_bit import low_bit_linear, tokens_of
from models.ops.matmul import linear


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
    update = linear(b.detach(), a.detach().t().contiguous(), None, invariant=b.is_cpu)
    return update.mul_(scale).add_(weight.detach()).to(weight.dtype)


def merge_rows(weight: Tensor, updates: Sequence[LowRank]) -> Tensor:
    """Return a copy of weight [N, K] with every update merged into its rows."""
    merged = weight.detach().clone()
    for update in updates:
        rows = slice(update.start, update.stop)
        merged[rows] = merge(weight[rows], update.a, update.b, update.scale)
    return merged


def adapted_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    updates: Sequence[LowRank],
    *,
    invariant: bool,
    low_bit: LowBitWeight | None = None,
) -> Tensor:
    """Return x [T, K] times the merged weight [N, K]^T plus bias, [T, N]; differentiable in x and the updates' a and b.

    `low_bit`: the merged weight as engines store it. The product is then the engine's, and gradients use
    straight-through estimation of both roundings (`mirrored_linear`)."""
    factors = [factor for update in updates for factor in (update.a, update.b)]
    result: Tensor = _Adapted.apply(x, weight, bias, updates, invariant, low_bit, *factors)  # type: ignore[no-untyped-call]
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
        *factors: Tensor,
    ) -> Tensor:
        ctx.places = [(update.scale, update.start, update.stop) for update in updates]
        ctx.low_bit, ctx.dtype = low_bit, x.dtype
        if low_bit is None:
            ctx.save_for_backward(weight, *factors, x)
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
        grad_x = None
        if ctx.needs_input_grad[0]:
            used = merge_rows(weight, updates) if ctx.low_bit is None else dequantise(ctx.low_bit).to(grad.dtype)
            grad_x = grad @ used
        grads: list[Tensor] = []
        for update in updates:
            rows, a, b = grad[:, update.start : update.stop], update.a.to(grad.dtype), update.b.to(grad.dtype)
            grads.append(((rows @ b).t() @ x).float().mul_(update.scale))
            grads.append((rows.t() @ (x @ a.t())).float().mul_(update.scale))
        return grad_x, None, None, None, None, None, *grads
