"""The oracle of low-bit products: plain torch, on any device. `models.ops.low_bit` defines the order of the
arithmetic."""

import torch
from torch import Tensor

from models.low_bit import FP8_LARGEST, LEVELS, LowBitWeight, dequantise, levels_of, over

SMALLEST = 2.0**-100  # of a token's largest value: below, 127 / max may be infinite, and the token counts as zeros


def quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [T, K] to int8 [T, K] and float32 scales [T, 1]; the scale is NaN if a token has a non-finite value."""
    exact = x.float()
    largest = exact.abs().amax(1, keepdim=True)
    finite = largest.isfinite() & ~exact.isnan().any(1, keepdim=True)
    counts = finite & (largest >= SMALLEST)
    # 127 / max, rounded once (torch computes number / tensor as a product with the inverse). The kernels multiply by
    # it; a division by the scale would differ.
    inverse = torch.where(counts, torch.full_like(largest, LEVELS) / largest, torch.zeros_like(largest))
    values = torch.where(finite, exact * inverse, torch.zeros_like(exact)).round().to(torch.int8)
    scales = torch.where(counts, over(largest, LEVELS), torch.zeros_like(largest))
    return values, torch.where(finite, scales, torch.full_like(scales, torch.nan))


def quantise_tokens_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [T, K] to float8_e4m3fn [T, K] and float32 scales [T, 1]."""
    exact = x.float()
    largest = exact.abs().amax(1, keepdim=True)
    scales = torch.where(largest > 0, over(largest, FP8_LARGEST), torch.ones_like(largest))
    return (exact / scales).to(torch.float8_e4m3fn), scales


def rounded_tokens(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise [T, K] to eight bits [T, K] and float32 scales [T, 1], in plain torch."""
    return quantise_tokens(x) if dtype is torch.int8 else quantise_tokens_fp8(x)


def reference(x: Tensor, weight: LowBitWeight, bias: Tensor | None = None) -> Tensor:
    """`low_bit_linear` in plain torch, on any device."""
    if weight.format.activations == "none":
        return product(x, None, weight, bias)
    dtype = torch.int8 if weight.format.activations == "int8" else torch.float8_e4m3fn
    return product(*rounded_tokens(x, dtype), weight, bias).to(x.dtype)


def product(values: Tensor, scales: Tensor | None, weight: LowBitWeight, bias: Tensor | None) -> Tensor:
    """Multiply tokens (as from `tokens_of`) by the weight, in plain torch.

    The result is float32, or the dtype of unquantised tokens. Raises ValueError if they do not fit."""
    require_fit(values, weight)
    if scales is None:
        y = values @ dequantise(weight).to(values.dtype).t()
        return y if bias is None else y + bias
    if values.dtype is torch.int8:
        total = _integer_sums(values, weight) * scales
    else:
        total = values.float() @ weight.values.float().t() * weight.scales[:, 0] * scales
    return total if bias is None else total + bias.float()


def require_fit(tokens: Tensor, weight: LowBitWeight) -> None:
    """Check the inputs. Raises ValueError."""
    if tokens.shape[1] != weight.inputs:
        raise ValueError(f"x {tuple(tokens.shape)} does not fit a weight of {weight.inputs} inputs")


def _integer_sums(values: Tensor, weight: LowBitWeight) -> Tensor:
    """float32 [T, N]: sums over groups of exact integers times scales. float64 represents the integers exactly."""
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
