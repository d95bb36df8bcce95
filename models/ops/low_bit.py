"""Products with low-bit weights. Defines the order of the arithmetic, so that all implementations (torch here, the
native kernel, Triton) give the same bits for integer formats, for any batch, number of threads and processor.

With x [T, K] in eight bits, value q and scale a = max|x| / 127 of each token, and weights s (w - z) in G groups: y =
(sum over g, rising, of float(sum over k of group g of q (w - z)) * s_g) * a + bias. The inner sums are exact integers,
the outer one is float32, each operation rounded once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from config.formats import DEEPEST, LowBitFormat
from models.dtypes import DTYPES
from models.low_bit import LowBitWeight, dequantise, quantise
from models.ops.low_bit_reference import reference, require_fit, rounded_tokens
from models.ops.matmul import linear, prepack
from models.ops.native import kernels, operand, takes
from models.ops.triton import low_bit_operators
from models.ops.triton.operators import operators_take

_PANELS = "_paceline_low_bit_panels"
_WIDENED = "_paceline_widened"
_TILE_INPUTS = 64  # a group in panels consists of whole tiles (native/kernels.h)


def low_bit_linear(x: Tensor, weight: LowBitWeight, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] times weight [N, K]^T plus bias [N], [T, N] in the dtype of x, for inference.

    Row t is bitwise independent of T and of the other rows. A token with a non-finite value gives NaN.

    On CPU the kernel reads the weight's panels; missing ones are packed now and kept. Where activations are not
    quantised it multiplies by a kept copy of the weight in the dtype of x: no faster, and no smaller. On CUDA the
    Triton operators compute, and fp8 raises RuntimeError if the device does not support it.
    """
    if operators_take(x):
        return low_bit_product(tokens_of(x, weight.format), weight, bias, x.dtype)
    if _kernel_takes(x, weight, bias):
        return _by_kernel(x, weight, bias)
    if bias is not None and bias.dtype is not x.dtype and _kernel_takes(x, weight, None):
        # Widening is exact, and both paths round the result once.
        return low_bit_linear(x.float(), weight, bias.float()).to(x.dtype)
    if weight.format.activations == "none" and x.is_cpu:
        require_fit(x, weight)
        return linear(x, _widened(weight, x.dtype), bias, invariant=True)
    return reference(x, weight, bias)


def _widened(weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight's numbers [N, K] in `dtype`, kept on its values until it changes. A CPU has no kernel that
    multiplies unquantised tokens by few bits."""
    kept: tuple[Tensor, tuple[int, ...]] | None = getattr(weight.values, _WIDENED, None)
    versions = low_bit_versions(weight)
    if kept is None or kept[1] != versions or kept[0].dtype is not dtype:
        kept = dequantise(weight).to(dtype), versions
        prepack(kept[0])
        setattr(weight.values, _WIDENED, kept)
    return kept[0]


def prepack_low_bit(weight: LowBitWeight) -> None:
    """Store the weight in the kernel's format on `weight.values`, for products; call again after it has changed.

    Later calls write into the same memory. Version counters detect in-place changes (not for inference tensors, nor
    through `.data`); the next product then packs again. Does nothing if no kernel supports the weight. Raises
    ValueError if scales do not fit the values, or the sums of a product might exceed an int32.
    """
    if hasattr(weight.values, _WIDENED):
        delattr(weight.values, _WIDENED)
    if not packable(weight):
        return
    columns, depth, groups = weight.outputs, weight.inputs, weight.scales.shape[1]
    per_group = weight.format.groups(depth)
    zeros = weight.zeros
    if weight.scales.shape != (columns, per_group) or (zeros is not None and zeros.shape != (columns, per_group)):
        raise ValueError(f"{weight.format.name}: scales {tuple(weight.scales.shape)} of a weight {[columns, depth]}")
    if depth > DEEPEST:
        raise ValueError(f"{weight.format.name}: {depth} inputs are more than the {DEEPEST} that an int32 sums exactly")
    bits = weight.format.container_bits
    old: tuple[Tensor, tuple[int, ...]] | None = getattr(weight.values, _PANELS, None)
    needed = kernels.low_bit_packed_bytes(bits, columns, depth, groups)  # type: ignore[union-attr]
    panels = torch.empty(needed, dtype=torch.uint8) if old is None else old[0]
    values, scales = weight.values.contiguous(), weight.scales.contiguous()
    zeros = None if zeros is None else zeros.contiguous()
    kernels.pack_low_bit(  # type: ignore[union-attr]
        bits,
        columns,
        depth,
        groups,
        values.data_ptr(),
        scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        panels.data_ptr(),
        torch.get_num_threads(),
    )
    setattr(weight.values, _PANELS, (panels, low_bit_versions(weight)))


def requantise(weight: Tensor, into: LowBitWeight) -> None:
    """Round `weight` [N, K] to the nearest in the format and memory of `into`, as `models.low_bit.quantise` does.

    With a kernel, only the panels are written, in one pass over the weight. Values, scales and zero points are then
    never read, so their untouched memory occupies no space. Raises ValueError if the shapes differ.
    """
    if weight.shape != (into.outputs, into.inputs):
        raise ValueError(f"a weight {list(weight.shape)} does not fit {[into.outputs, into.inputs]}")
    if not (packable(into) and takes(weight) and hasattr(kernels, "quantise_pack")):
        for part, rounded in zip(into.parts, quantise(weight, into.format).parts, strict=True):
            part.copy_(rounded)
        prepack_low_bit(into)
        return
    shape = into.format.container_bits, into.outputs, into.inputs, into.format.groups(into.inputs)
    old: tuple[Tensor, tuple[int, ...]] | None = getattr(into.values, _PANELS, None)
    needed = kernels.low_bit_packed_bytes(*shape)  # type: ignore[union-attr]
    panels = torch.empty(needed, dtype=torch.uint8) if old is None else old[0]
    bits, *rest = shape
    source = weight.detach().contiguous()
    kernels.quantise_pack(  # type: ignore[union-attr]
        weight.dtype is torch.bfloat16,
        bits,
        into.format.bits,
        *rest,
        source.data_ptr(),
        panels.data_ptr(),
        torch.get_num_threads(),
    )
    setattr(into.values, _PANELS, (panels, low_bit_versions(into)))


def low_bit_panels(weight: LowBitWeight) -> Tensor:
    """Return the panels of the weight's present version, packed now if they are outdated. uint8, flat."""
    packed: tuple[Tensor, tuple[int, ...]] | None = getattr(weight.values, _PANELS, None)
    if packed is None or packed[1] != low_bit_versions(weight):
        prepack_low_bit(weight)
        packed = getattr(weight.values, _PANELS)
    assert packed is not None
    return packed[0]


def low_bit_versions(weight: LowBitWeight) -> tuple[int, ...]:
    """Return the address of the values (a copied tensor brings copied panels along), and in-place change counts of the
    weight's tensors, always 0 for inference tensors."""
    return weight.values.data_ptr(), *(0 if part.is_inference() else part._version for part in weight.parts)


def packable(weight: LowBitWeight) -> bool:
    """Return whether the kernel supports the weight (older builds of the extension have none)."""
    form, depth = weight.format, weight.inputs
    if form.activations != "int8" or (form.group is not None and depth // form.groups(depth) % _TILE_INPUTS != 0):
        return False
    there = weight.values.is_cpu and hasattr(kernels, "low_bit_linear")
    return there and weight.scales.dtype is torch.float32 and takes(weight.scales)


def mirrored_linear(x: Tensor, master: Tensor, weight: LowBitWeight, bias: Tensor | None = None) -> Tensor:
    """The engine's `low_bit_linear`, for the learner: `weight` is `master` [N, K] quantised.

    Gradients use straight-through estimation of both roundings (QaRL, section 3.1): grad x = grad W_q, grad master =
    grad^T x_q."""
    result: Tensor = _Mirrored.apply(x, master, weight, bias)  # type: ignore[no-untyped-call]
    return result


def quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [T, K] to int8 [T, K] and float32 scales [T, 1]; the scale is NaN if a token has a non-finite value."""
    if takes(x) and hasattr(kernels, "quantise_rows"):
        x = x if x.stride(1) == 1 else x.contiguous()
        values, scales = x.new_empty(x.shape, dtype=torch.int8), x.new_empty((len(x), 1), dtype=torch.float32)
        kernels.quantise_rows(  # type: ignore[union-attr]
            x.dtype is torch.bfloat16,
            x.data_ptr(),
            x.stride(0),
            *x.shape,
            values.data_ptr(),
            scales.data_ptr(),
            torch.get_num_threads(),
        )
        return values, scales
    return _rounded(x, torch.int8)


def tokens_of(x: Tensor, form: LowBitFormat) -> tuple[Tensor, ...]:
    """Return the operands of a product in that format, for inference: (values, scales), or x unchanged."""
    rounded = token_dtype(form)
    if rounded is None:
        return (x,)
    return quantise_tokens(x) if rounded is torch.int8 else _rounded(x, rounded)


def token_dtype(form: LowBitFormat) -> torch.dtype | None:
    """Return the dtype that the format's activations are rounded to; None: they are not."""
    return None if form.activations == "none" else DTYPES[form.activations]


def _kernel_takes(x: Tensor, weight: LowBitWeight, bias: Tensor | None) -> bool:
    return (takes(x) if bias is None else takes(x, bias)) and packable(weight)


def _by_kernel(
    x: Tensor, weight: LowBitWeight, bias: Tensor | None, tokens: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """tokens: optional output for the quantised x, as from `quantise_tokens`."""
    rows, depth = x.shape
    columns = weight.outputs
    x = operand(x, columns, weight.inputs, bias)
    bias = bias if bias is None else bias.contiguous()
    panels = low_bit_panels(weight)
    out = x.new_empty((rows, columns))
    kernels.low_bit_linear(  # type: ignore[union-attr]
        x.dtype is torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        panels.data_ptr(),
        weight.format.container_bits,
        columns,
        depth,
        weight.scales.shape[1],
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        torch.get_num_threads(),
        0 if tokens is None else tokens[0].data_ptr(),
        0 if tokens is None else tokens[1].data_ptr(),
    )
    return out


def low_bit_product(
    tokens: tuple[Tensor, ...], weight: LowBitWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `low_bit_linear` of tokens as from `tokens_of`, [T, N] in `dtype`, by the operators of CUDA."""
    require_fit(tokens[0], weight)
    values, scales = tokens if len(tokens) == 2 else (tokens[0], None)
    result: Tensor = low_bit_operators.low_bit_linear(
        values, scales, weight.values, weight.scales, weight.zeros, bias, dtype
    )
    return result


def _rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not operators_take(x):
        return rounded_tokens(x, dtype)
    found: tuple[Tensor, Tensor] = low_bit_operators.quantise_tokens(x, dtype)
    return found


class _Mirrored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, weight: LowBitWeight, bias: Tensor | None) -> Tensor:
        ctx.weight, ctx.dtype = weight, x.dtype
        if _kernel_takes(x, weight, bias):
            values, scales = x.new_empty(x.shape, dtype=torch.int8), x.new_empty((len(x), 1), dtype=torch.float32)
            ctx.save_for_backward(values, scales)
            return _by_kernel(x, weight, bias, (values, scales))
        tokens = tokens_of(x, weight.format)
        ctx.save_for_backward(*tokens)  # eight bits: a quarter of the memory, and the actual operands of the product
        return low_bit_product(tokens, weight, bias, x.dtype) if operators_take(x) else low_bit_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None]:
        for_x, for_master, _, for_bias = ctx.needs_input_grad
        grad_x = grad @ dequantise(ctx.weight).to(grad.dtype) if for_x else None
        grad_master = None
        if for_master:
            values, *scales = ctx.saved_tensors
            x = values.float().mul_(scales[0]).to(ctx.dtype) if scales else values
            grad_master = grad.t() @ x
        return grad_x, grad_master, None, grad.sum(0) if for_bias else None
