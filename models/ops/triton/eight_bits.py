# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Tokens in eight bits with a scale each: of a tensor, of a norm, of SwiGLU. `models.ops.low_bit` defines the rounding.

The fused kernels give the bits of both kernels that they replace: a norm or SwiGLU is rounded to the model's dtype
before it is quantised. They save a launch and a pass over memory.
"""

import triton
import triton.language as tl

from models.ops.triton.overlap import after_previous
from models.ops.triton.tokenwise import gated_row, normed_row

_ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to integers, halves to even
_INFINITE: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit
def _magnitude(exact):
    """float32 -> magnitudes as integers: one maximum covers infinities and, above them, NaN."""
    return exact.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(bits, INTEGER: tl.constexpr, LEVELS: tl.constexpr, SMALLEST: tl.constexpr):
    """A row's largest magnitude -> its scale, what its values are multiplied (INTEGER) or divided by, is it finite."""
    largest = bits.to(tl.float32, bitcast=True)
    finite = bits < _INFINITE
    if INTEGER:
        counts = finite & (largest >= SMALLEST)
        factor = tl.where(counts, tl.div_rn(LEVELS, tl.where(counts, largest, 1.0)), 0.0)
        scale = tl.where(counts, tl.div_rn(largest, LEVELS), 0.0)
        scale = tl.where(finite, scale, float("nan"))
    else:
        scale = tl.where(largest > 0.0, tl.div_rn(largest, LEVELS), 1.0)
        factor = scale
    return scale, factor, finite


@triton.jit
def _store_eight(to, exact, factor, finite, inside, INTEGER: tl.constexpr):
    """Round float32 values, and store them."""
    if INTEGER:
        near = tl.where(finite, exact * factor, 0.0)
        value = ((near + _ROUNDER) - _ROUNDER).to(tl.int32).to(tl.int8)
    else:
        value = tl.div_rn(exact, factor).to(to.dtype.element_ty)
    tl.store(to, value, mask=inside)


@triton.jit
def quantise_tokens(
    x,  # [rows, DEPTH], rows STRIDE apart
    values,  # [rows, DEPTH], int8 or float8_e4m3fn
    scales,  # float32 [rows]
    DEPTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    INTEGER: tl.constexpr,
    LEVELS: tl.constexpr,  # the largest value
    SMALLEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row): two passes over its values, the second from the cache."""
    if PDL:
        after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.int32)
    for start in range(0, DEPTH, BLOCK):
        inside = start + column < DEPTH
        exact = tl.load(x + row * STRIDE + start + column, mask=inside, other=0.0).to(tl.float32)
        most = tl.maximum(most, _magnitude(exact))
    scale, factor, finite = _scale_of(tl.max(most, 0), INTEGER, LEVELS, SMALLEST)
    tl.store(scales + row, scale)
    for start in range(0, DEPTH, BLOCK):
        inside = start + column < DEPTH
        exact = tl.load(x + row * STRIDE + start + column, mask=inside, other=0.0).to(tl.float32)
        _store_eight(values + row * DEPTH + start + column, exact, factor, finite, inside, INTEGER)


@triton.jit
def add_norm_quantise(
    x,  # [rows, SIZE]
    residual,  # [rows, SIZE]
    weight,  # [SIZE]
    values,  # [rows, SIZE], int8 or float8_e4m3fn
    scales,  # float32 [rows]
    summed,  # [rows, SIZE]
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    INTEGER: tl.constexpr,
    LEVELS: tl.constexpr,
    SMALLEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row): `quantise_tokens` of `rms_norm`, which is kept in registers; the sum is stored."""
    if PDL:
        after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < SIZE
    normed = normed_row(x, residual, weight, summed, row * SIZE, column, inside, eps, SIZE, True).to(tl.float32)
    scale, factor, finite = _scale_of(tl.max(_magnitude(normed), 0), INTEGER, LEVELS, SMALLEST)
    tl.store(scales + row, scale)
    # Of a row a thread has as many as `rms_norm` stores at once. With as many as fill 16 bytes here, the compiler would
    # have the squares summed in another order, and the norm's bits would differ.
    few = tl.max_contiguous(column, 128 // summed.dtype.element_ty.primitive_bitwidth)
    _store_eight(values + row * SIZE + few, normed, factor, finite, inside, INTEGER)


@triton.jit
def swiglu_quantise(
    gate_up,  # [rows, 2 SIZE]
    values,  # [rows, SIZE], int8 or float8_e4m3fn
    scales,  # float32 [rows]
    SIZE: tl.constexpr,
    HEAD: tl.constexpr,  # the largest power of two in SIZE
    TAIL: tl.constexpr,  # a power of two that covers the rest, or 0
    INTEGER: tl.constexpr,
    LEVELS: tl.constexpr,
    SMALLEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row): `quantise_tokens` of `swiglu`, which is kept in registers, in two parts: less padding than one."""
    if PDL:
        after_previous()
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD)
    first = gated_row(gate_up, row, head, head < SIZE, SIZE).to(tl.float32)
    bits = tl.max(_magnitude(first), 0)
    if TAIL:
        tail = HEAD + tl.arange(0, TAIL)
        second = gated_row(gate_up, row, tail, tail < SIZE, SIZE).to(tl.float32)
        bits = tl.maximum(bits, tl.max(_magnitude(second), 0))
    scale, factor, finite = _scale_of(bits, INTEGER, LEVELS, SMALLEST)
    tl.store(scales + row, scale)
    _store_eight(values + row * SIZE + head, first, factor, finite, head < SIZE, INTEGER)
    if TAIL:
        _store_eight(values + row * SIZE + tail, second, factor, finite, tail < SIZE, INTEGER)
