"""Matrix products: rows independent of the batch, and weights packed for inference.

On CPU the native kernel sums every element in one fixed order, so it is batch-invariant at no cost. On CUDA a Triton
kernel of fixed tiles does (`models.ops.triton`), for inference. Without either, rows are padded, because below
INVARIANT_ROWS a BLAS uses other kernels or splits, and another order of sums. Padded results are equal up to rounding
only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.ops.native import kernels, operand, takes
from models.ops.triton import operators
from models.ops.triton.operators import operators_take

INVARIANT_ROWS = 16  # measured with MKL on AVX-512: equal from 8 rows per thread on, 2 threads
_BF16 = torch.bfloat16
_PANELS = "_paceline_panels"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, invariant: bool) -> Tensor:
    """x [T, K] @ weight [N, K]^T + bias [N] -> [T, N], differentiable; sums in float32 (or wider).

    invariant: row t of the result is bitwise independent of T and the other rows, with panels or without. Otherwise the
    kernel reads `prepack`ed weights from their panels, and torch computes the others.
    """
    if not takes(x, weight) or (bias is not None and not takes(x, bias)):
        if not invariant:
            return F.linear(x, weight, bias)
        if operators_take(x, weight) if bias is None else operators_take(x, weight, bias):
            product: Tensor = operators.linear(x, weight, bias, False)
            return product
        return _padded(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        if not invariant:
            return F.linear(x, weight, bias)
        result: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return result
    panels = panels_of(weight)
    if not invariant and panels is None:
        return F.linear(x, weight, bias)
    return _native(x, weight, panels, bias)


def head(hidden: Tensor, weight: Tensor, *, invariant: bool) -> Tensor:
    """Logits: hidden [T, H] @ weight [V, H]^T -> [T, V], differentiable.

    On CUDA float32, sums unrounded, for sampling and for the loss; elsewhere `linear`, in the dtype of the weights.
    Reason: in bfloat16 neighbouring logits near 23 are 0.125 apart, so two kernels' draws differ three times as often.
    """
    if weight.dtype is not _BF16 or hidden.dtype is not _BF16 or not (hidden.is_cuda or hidden.is_meta):
        return linear(hidden, weight, None, invariant=invariant)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        result: Tensor = _Head.apply(hidden, weight)  # type: ignore[no-untyped-call]
        return result
    take = invariant and operators_take(hidden, weight)
    logits: Tensor = operators.linear(hidden, weight, None, True) if take else operators.head(hidden, weight)
    return logits


def prepack(weight: Tensor) -> None:
    """Store a copy of weight [N, K] on it, in the kernel's format, for inference; call again after it has changed.

    Later calls write into the same memory. The version counter detects in-place changes (not through `.data`); outdated
    panels are ignored. Does nothing if no kernel supports the weight.
    """
    if kernels is None or not takes(weight):
        return
    columns, depth = weight.shape
    old = getattr(weight, _PANELS, None)
    panels = weight.new_empty(kernels.packed_size(columns, depth)) if old is None else old[0]
    source = weight.detach().contiguous()
    kernels.pack_weight(weight.dtype is torch.bfloat16, source.data_ptr(), panels.data_ptr(), columns, depth)
    setattr(weight, _PANELS, (panels, _version(weight)))


def _version(weight: Tensor) -> int:
    """Return the count of in-place changes of the weight; always 0 for inference tensors."""
    return 0 if weight.is_inference() else weight._version


def panels_of(weight: Tensor) -> Tensor | None:
    """Return the panels stored by `prepack`, or None if they are outdated or missing."""
    packed: tuple[Tensor, int] | None = getattr(weight, _PANELS, None)
    return None if packed is None or packed[1] != _version(weight) else packed[0]


def _native(x: Tensor, weight: Tensor, panels: Tensor | None, bias: Tensor | None) -> Tensor:
    rows, depth = x.shape
    columns = weight.shape[0]
    x = operand(x, columns, weight.shape[1], bias)
    source = weight.contiguous() if panels is None else panels
    out = x.new_empty((rows, columns))
    kernels.linear(  # type: ignore[union-attr]
        x.dtype is torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        source.data_ptr(),
        panels is not None,
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        columns,
        depth,
        torch.get_num_threads(),
    )
    return out


def _padded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.shape[0]
    if rows >= INVARIANT_ROWS:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, INVARIANT_ROWS - rows)), weight, bias)[:rows]


class _Linear(torch.autograd.Function):
    """The kernel forward, bitwise as in inference; torch's products backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _native(x, weight, None, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            grad @ weight if for_x else None,
            grad.t() @ x if for_weight else None,
            grad.sum(0) if for_bias else None,
        )


class _Head(torch.autograd.Function):
    """float32 logits of bfloat16 operands; the backward multiplies bfloat16 and sums in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        logits: Tensor = operators.head(hidden, weight)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad
        grad = grad.to(weight.dtype)
        return grad @ weight if for_hidden else None, grad.t() @ hidden if for_weight else None
