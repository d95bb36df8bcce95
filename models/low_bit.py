"""Low-bit weights: rounding to the nearest, and back. No files, no network; `models.ops.low_bit` has the products,
`config.formats` the names.

W8A8 is the format that `compressed-tensors` calls int-quantized, which vLLM computes on CPUs and GPUs: symmetric, one
scale per output row. Grouped formats are asymmetric: weight = scale * (value - zero), and 0 is always representable.
All arithmetic is float32, one operation at a time, so that learner and engine, CPU and GPU round alike.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from config.formats import FORMATS, LowBitFormat, part_names

LEVELS = 127  # -127 .. 127: symmetric, so that there is no zero point and -w rounds to -q
FP8_LARGEST = 448.0  # of float8_e4m3fn
KEPT = ("embed_tokens.weight", "lm_head.weight")  # suffixes of matrices that stay unquantised


@dataclass(frozen=True, slots=True)
class LowBitWeight:
    """A weight [N, K] in `format`, with G scales per row."""

    format: LowBitFormat
    values: Tensor  # `format.stored`: [N, K], or uint8 [N, K / 2], the even input in the low half of a byte
    scales: Tensor  # float32 [N, G]
    zeros: Tensor | None = None  # uint8 [N, G] if the format is asymmetric

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Its tensors, in the order of `formats.part_names`."""
        return (self.values, self.scales) if self.zeros is None else (self.values, self.scales, self.zeros)

    @property
    def outputs(self) -> int:
        """N"""
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        """K"""
        return self.values.shape[1] * 8 // self.format.container_bits


def quantise(weight: Tensor, form: LowBitFormat) -> LowBitWeight:
    """Round float [N, K] to the nearest weight in `form`. A row or group of zeros has scale 1. Raises ValueError if the
    groups do not divide K."""
    groups = form.groups(weight.shape[1])
    exact = weight.detach().float()
    if form.stored == "float8_e4m3fn":
        scales = _positive(over(exact.abs().amax(1, keepdim=True), FP8_LARGEST))
        return LowBitWeight(form, (exact / scales).to(torch.float8_e4m3fn), scales)
    if form.group is None:
        return LowBitWeight(form, *quantise_rows(exact))
    exact = exact.reshape(len(exact), groups, -1)
    most = 2**form.bits - 1
    low, high = exact.amin(2, keepdim=True).clamp(max=0), exact.amax(2, keepdim=True).clamp(min=0)
    scales = _positive(over(high - low, most))
    zeros = (-low / scales).round().clamp(0, most)
    values = (exact / scales).round_().add_(zeros).clamp_(0, most).to(torch.uint8).flatten(1)
    return LowBitWeight(form, values[:, 0::2] | values[:, 1::2] << 4, scales[..., 0], zeros[..., 0].to(torch.uint8))


def dequantise(weight: LowBitWeight) -> Tensor:
    """float32 [N, K]"""
    if weight.zeros is None:
        return weight.values.float().mul_(weight.scales)
    levels = levels_of(weight).float().view(*weight.scales.shape, -1)
    return levels.sub_(weight.zeros[..., None]).mul_(weight.scales[..., None]).flatten(1)


def levels_of(weight: LowBitWeight) -> Tensor:
    """Return the stored integers, [N, K]: int8, or uint8 without the zero points subtracted."""
    if weight.format.container_bits == 8:
        return weight.values
    return torch.stack((weight.values & 15, weight.values >> 4), dim=-1).flatten(1)


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> int8 [N, K] and float32 scales [N, 1], so that weight is about values * scales.

    scale = max|row| / 127, value = round(weight / scale), halves to even, in float32. A row of zeros has scale 1.
    """
    exact = weight.float()
    scales = _positive(over(exact.abs().amax(1, keepdim=True), LEVELS))
    return (exact / scales).round_().clamp_(-LEVELS, LEVELS).to(torch.int8), scales


def named_parts(name: str, weight: LowBitWeight) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight's stored tensors: under its name, and that name with suffixes."""
    yield from zip(part_names(name, weight.format), weight.parts, strict=True)


def is_quantised(name: str, dimensions: int) -> bool:
    """Return whether a low-bit model stores this checkpoint tensor in few bits: the matrices of its layers."""
    return dimensions == 2 and name.endswith(".weight") and not name.endswith(KEPT)


def quantised(
    named: Iterable[tuple[str, Tensor]], form: LowBitFormat = FORMATS["w8a8"]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint's tensors with every layer matrix quantised, each followed by its scales and zero points."""
    for name, tensor in named:
        if is_quantised(name, tensor.dim()):
            yield from named_parts(name, quantise(tensor, form))
        else:
            yield name, tensor


def over(x: Tensor, number: float) -> Tensor:
    """x / number, rounded once on every device. CUDA would multiply by the inverse of a Python number."""
    return x / torch.full_like(x, number)


def _positive(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, torch.ones_like(scales))
