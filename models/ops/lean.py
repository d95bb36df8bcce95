"""Memory-saving gradients of RMS norm, SwiGLU and rotation for devices: only inputs are kept for the backward pass.

torch's own keep their float32 steps: 2.2 times as many bytes of a layer (`policies.roofline.memory.saved_bytes`).
Forward is the operators' kernel, or the oracle; backward is torch, in float32, rounded once. The CPU has native kernels
instead.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.ops import reference
from models.ops.triton import operators
from models.ops.triton.operators import operators_take

_CHUNK = 1 << 24  # elements per float32 step of SwiGLU's backward: 64 MiB each


def wanted(*tensors: Tensor) -> bool:
    """Return whether to compute these tensors' gradients here: on a device (or meta), with a backward pass."""
    if not (tensors[0].is_cuda or tensors[0].is_meta) or not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = _LeanRMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def swiglu(gate_up: Tensor) -> Tensor:
    gated: Tensor = _LeanSwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    return gated


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated: Tensor = _LeanRope.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _LeanRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        if operators_take(x, weight):
            normed: Tensor = operators.rms_norm(x, weight, eps)
            return normed
        return reference.rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wide, slopes = x.float(), grad.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
        normed = wide.mul_(scale) if wide is not x else wide * scale
        for_weight = None
        if ctx.needs_input_grad[1]:
            for_weight = (slopes * normed).flatten(0, -2).sum(0).to(weight.dtype)
        slopes = slopes * weight.float()
        # d normed / d x = scale (1 - normed normed^T / D)
        along = (slopes * normed).mean(-1, keepdim=True)
        return normed.mul_(-along).add_(slopes).mul_(scale).to(x.dtype), for_weight, None


class _LeanSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        if operators_take(gate_up):
            gated: Tensor = operators.swiglu(gate_up)
            return gated
        return reference.swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        result, half = torch.empty_like(gate_up), gate_up.shape[-1] // 2
        rows = max(1, _CHUNK // half)
        parts = (torch.split(x.flatten(0, -2), rows) for x in (gate_up, grad, result))
        for given, slope, out in zip(*parts, strict=True):
            gate, up = (part.float() for part in torch.split(given, half, dim=-1))
            slopes, share = slope.float(), torch.sigmoid(gate)
            out[:, half:] = slopes * gate * share
            # silu'(g) = s (1 + g (1 - s))
            out[:, :half] = slopes * up * share * (1 + gate * (1 - share))
        return result


class _LeanRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)  # shared by all layers
        return reference.apply_rope(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return reference.apply_rope(grad, cos, -sin), None, None  # the transpose is the inverse rotation
