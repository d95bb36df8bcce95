"""Operators of low-bit products among `paceline::*`: schema, CPU (the oracle), meta (shapes), CUDA (one kernel each).

The rules of `operators` apply; `models.ops.low_bit` defines the results and calls these. Values, scales and zero points
are separate arguments, since an operator takes tensors.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from config.formats import FORMATS, LowBitFormat
from models.low_bit import LowBitWeight
from models.ops import reference
from models.ops.low_bit_reference import product, rounded_tokens
from models.ops.triton.operators import IN_LAYERS, launched

FP8_CAPABILITY = (8, 9)
_SCHEMAS = (
    "quantise_tokens(Tensor x, ScalarType dtype) -> (Tensor values, Tensor scales)",
    "add_norm_quantise(Tensor x, Tensor residual, Tensor weight, float eps, ScalarType dtype)"
    " -> (Tensor values, Tensor scales, Tensor total)",
    "swiglu_quantise(Tensor gate_up, ScalarType dtype) -> (Tensor values, Tensor scales)",
    "low_bit_linear(Tensor x, Tensor? token_scales, Tensor weight, Tensor scales, Tensor? zeros, Tensor? bias,"
    " ScalarType dtype) -> Tensor",
)


def require_products(form: LowBitFormat, device: torch.device | str) -> None:
    """Raise ValueError if the GPU's tensor cores do not support the format.

    Triton's own error, in the first step, has neither the GPU nor a remedy."""
    if torch.device(device).type != "cuda" or form.stored != "float8_e4m3fn":
        return
    found = torch.cuda.get_device_capability(device)
    if found < FP8_CAPABILITY:
        raise ValueError(
            f"rollout.quantization={form.name}: {torch.cuda.get_device_name(device)} has compute capability"
            f" {found[0]}.{found[1]}, and products of fp8 begin with {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]}"
            " (Ada, Hopper): take w8a8, which is as small, or such a GPU"
        )


def _cpu_add_norm_quantise(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    total = x + residual
    return *rounded_tokens(reference.rms_norm(total, weight, eps), dtype), total


def _cpu_swiglu_quantise(gate_up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return rounded_tokens(reference.swiglu(gate_up), dtype)


def _cpu_low_bit_linear(
    x: Tensor,
    token_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    of_bytes = FORMATS["w8a8"] if weight.dtype is torch.int8 else FORMATS["fp8"]
    of_nibbles = FORMATS["w4a8"] if x.dtype is torch.int8 else FORMATS["w4a16"]
    form = of_bytes if zeros is None else of_nibbles
    return product(x, token_scales, LowBitWeight(form, weight, scales, zeros), bias).to(dtype)


def _meta_eight_bits(x: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], size, dtype=dtype), x.new_empty(x.shape[0], 1, dtype=torch.float32)


def _meta_low_bit_linear(x: Tensor, token_scales: Tensor | None, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=rest[-1])


_ON_CPU: Mapping[str, Callable[..., Any]] = {
    "quantise_tokens": rounded_tokens,
    "add_norm_quantise": _cpu_add_norm_quantise,
    "swiglu_quantise": _cpu_swiglu_quantise,
    "low_bit_linear": _cpu_low_bit_linear,
}
_ON_META: Mapping[str, Callable[..., Any]] = {
    "quantise_tokens": lambda x, dtype: _meta_eight_bits(x, x.shape[1], dtype),
    "add_norm_quantise": lambda x, *rest: (*_meta_eight_bits(x, x.shape[1], rest[-1]), x.new_empty(x.shape)),
    "swiglu_quantise": lambda gate_up, dtype: _meta_eight_bits(gate_up, gate_up.shape[1] // 2, dtype),
    "low_bit_linear": _meta_low_bit_linear,
}
_LIBRARY: Any = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call]
_ON_CUDA = {name: launched(name, "launch_low_bit", oracle) for name, oracle in _ON_CPU.items()}
for _schema in _SCHEMAS:
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _ON_CPU[_name], "CPU")
    _LIBRARY.impl(_name, _ON_META[_name], "Meta")
    _LIBRARY.impl(_name, _ON_CUDA[_name], "CUDA")

quantise_tokens = torch.ops.paceline.quantise_tokens.default
add_norm_quantise = torch.ops.paceline.add_norm_quantise.default
swiglu_quantise = torch.ops.paceline.swiglu_quantise.default
low_bit_linear = torch.ops.paceline.low_bit_linear.default
IN_LAYERS.update({name: (sys.modules[__name__], _ON_CUDA[name]) for name in ("add_norm_quantise", "swiglu_quantise")})
