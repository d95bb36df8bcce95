"""Products with weights in few bits. Owns the order of the arithmetic: whatever computes them (torch here, the native
kernel, Triton) gives the same bits for integer formats, for any batch, number of threads and kind of processor.

With x [T, K] in eight bits, value q and scale a = max|x| / 127 of each token, and weights s (w - z) in G groups:
y = (sum over g, rising, of float(sum over k of group g of q (w - z)) * s_g) * a + bias. The inner sums are exact
integers, the outer one is float32, each operation rounded once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.low_bit import FP8_LARGEST, LEVELS, LowBitWeight, dequantise, levels_of

_SMALLEST = 2.0**-100  # of a token's largest value: below, 127 / max might be infinite, and the token counts as zeros


def low_bit_linear(x: Tensor, weight: LowBitWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times weight [N, K]^T plus bias [N] -> [T, N] in the dtype of x, for inference. Row t is bitwise the
    same whatever T and the other rows are. A token with a value that is not finite gives NaN."""
    return reference(x, weight, bias)


def mirrored_linear(x: Tensor, master: Tensor, weight: LowBitWeight, bias: Tensor | None = None) -> Tensor:
    """`low_bit_linear` of the engine, for the learner: `weight` is `master` [N, K] quantised, and the gradient goes
    straight through both roundings (QaRL, section 3.1): grad x = grad W_q, grad master = grad^T x_q."""
    result: Tensor = _Mirrored.apply(x, master, weight, bias)  # type: ignore[no-untyped-call]
    return result


def quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, K] -> int8 [T, K] and float32 scales [T, 1]; NaN where a value of the token is not finite."""
    exact = x.float()
    largest = exact.abs().amax(1, keepdim=True)
    finite = largest.isfinite() & ~exact.isnan().any(1, keepdim=True)
    counts = finite & (largest >= _SMALLEST)
    # 127 / max, rounded once: a product with it is what the kernels compute, a division by the scale is not.
    inverse = torch.where(counts, LEVELS / largest, torch.zeros_like(largest))
    values = torch.where(finite, exact * inverse, torch.zeros_like(exact)).round().to(torch.int8)
    scales = torch.where(counts, largest / LEVELS, torch.zeros_like(largest))
    return values, torch.where(finite, scales, torch.full_like(scales, torch.nan))


def quantise_tokens_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, K] -> float8_e4m3fn [T, K] and float32 scales [T, 1], likewise."""
    exact = x.float()
    largest = exact.abs().amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest / FP8_LARGEST, torch.ones_like(largest))
    return (exact / scales).to(torch.float8_e4m3fn), scales


def reference(x: Tensor, weight: LowBitWeight, bias: Tensor | None = None) -> Tensor:
    """`low_bit_linear` in plain torch, on any device."""
    if x.shape[1] != weight.inputs:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight of {weight.inputs} inputs")
    match weight.format.activations:
        case "none":
            y = x @ dequantise(weight).to(x.dtype).t()
            return y if bias is None else y + bias
        case "float8_e4m3fn":
            values, scales = quantise_tokens_fp8(x)
            total = values.float() @ weight.values.float().t() * weight.scales[:, 0] * scales
        case "int8":
            values, scales = quantise_tokens(x)
            total = _integer_sums(values, weight) * scales
    if bias is not None:
        total = total + bias.float()
    return total.to(x.dtype)


def _integer_sums(values: Tensor, weight: LowBitWeight) -> Tensor:
    """float32 [T, N]: sums over groups of exact integers times scales. float64 holds the integers exactly."""
    groups = weight.scales.shape[1]
    wide = levels_of(weight).double()
    if weight.zeros is not None:
        wide = (wide.view(len(wide), groups, -1) - weight.zeros[..., None].double()).flatten(1)
    inputs = wide.shape[1] // groups
    total = torch.zeros(len(values), weight.outputs, device=values.device)
    for g in range(groups):
        part = slice(g * inputs, (g + 1) * inputs)
        total += (values[:, part].double() @ wide[:, part].t()).float() * weight.scales[:, g]
    return total


class _Mirrored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, weight: LowBitWeight, bias: Tensor | None) -> Tensor:
        ctx.weight, ctx.dtype = weight, x.dtype
        if weight.format.activations == "none":
            ctx.save_for_backward(x)
        else:  # a quarter of the memory, and what the product was computed from
            tokens = quantise_tokens if weight.format.activations == "int8" else quantise_tokens_fp8
            ctx.save_for_backward(*tokens(x))
        return low_bit_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None]:
        for_x, for_master, _, for_bias = ctx.needs_input_grad
        grad_x = grad @ dequantise(ctx.weight).to(grad.dtype) if for_x else None
        grad_master = None
        if for_master:
            values, *scales = ctx.saved_tensors
            x = (values.float() * scales[0]).to(ctx.dtype) if scales else values
            grad_master = grad.t() @ x
        return grad_x, grad_master, None, grad.sum(0) if for_bias else None
