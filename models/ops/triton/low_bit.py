# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Quantise tokens to eight bits, and multiply by low-bit weights. `models.ops.low_bit` defines the order of the
arithmetic.

Integer sums are exact, so tiles can depend on the number of rows without changing a bit. Sums in float32 (fp8, and four
bits with bfloat16) have one tile for all rows. No split of K, no atomics: a program owns its outputs.
"""

import triton
import triton.language as tl

_ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to integers, halves to even
_INFINITE: tl.constexpr = tl.constexpr(0x7F800000)


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
):
    """Program (row): two passes over its values, the second from the cache."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    # Magnitudes as integers: one maximum covers infinities and, above them, NaN.
    most = tl.zeros([BLOCK], tl.int32)
    for start in range(0, DEPTH, BLOCK):
        inside = start + column < DEPTH
        exact = tl.load(x + row * STRIDE + start + column, mask=inside, other=0.0).to(tl.float32)
        most = tl.maximum(most, exact.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    bits = tl.max(most, 0)
    largest = bits.to(tl.float32, bitcast=True)
    if INTEGER:
        finite = bits < _INFINITE
        counts = finite & (largest >= SMALLEST)
        factor = tl.where(counts, tl.div_rn(LEVELS, tl.where(counts, largest, 1.0)), 0.0)
        scale = tl.where(counts, tl.div_rn(largest, LEVELS), 0.0)
        scale = tl.where(finite, scale, float("nan"))
    else:
        finite = True
        scale = tl.where(largest > 0.0, tl.div_rn(largest, LEVELS), 1.0)
        factor = scale
    tl.store(scales + row, scale)
    for start in range(0, DEPTH, BLOCK):
        inside = start + column < DEPTH
        exact = tl.load(x + row * STRIDE + start + column, mask=inside, other=0.0).to(tl.float32)
        if INTEGER:
            near = tl.where(finite, exact * factor, 0.0)
            value = ((near + _ROUNDER) - _ROUNDER).to(tl.int32).to(tl.int8)
        else:
            value = tl.div_rn(exact, factor).to(values.dtype.element_ty)
        tl.store(values + row * DEPTH + start + column, value, mask=inside)


@triton.jit
def _stored(
    total, x_scales, bias, out, row, column, rows, COLUMNS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr
):
    """The sums times each token's scale, plus bias, rounded."""
    if SCALED:
        total = total * tl.load(x_scales + row, mask=row < rows, other=0.0)[:, None]
    if BIAS:
        total += tl.load(bias + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < COLUMNS)[None, :])


@triton.jit(do_not_specialize=["rows"])
def multiply_bytes(
    x,  # [rows, DEPTH], int8 or float8_e4m3fn
    x_scales,  # float32 [rows]
    weight,  # [COLUMNS, DEPTH], likewise
    scales,  # float32 [COLUMNS]
    bias,  # [COLUMNS], with BIAS
    out,  # [rows, COLUMNS]
    rows,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    INTEGER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    """Program (tile of rows, tile of columns); tiles of rows that share weights follow one another."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    depth = tl.arange(0, TILE_DEPTH)
    of_rows, of_columns = (row < rows)[:, None], (column < COLUMNS)[:, None]
    left = x + row.to(tl.int64)[:, None] * DEPTH + depth[None, :]
    right = weight + column.to(tl.int64)[:, None] * DEPTH + depth[None, :]
    sums = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32 if INTEGER else tl.float32)
    for start in range(0, DEPTH, TILE_DEPTH):
        if DEPTH % TILE_DEPTH:
            inside = (start + depth < DEPTH)[None, :]
            a = tl.load(left, mask=of_rows & inside, other=0.0)
            b = tl.load(right, mask=of_columns & inside, other=0.0)
        else:
            a = tl.load(left, mask=of_rows, other=0.0)
            b = tl.load(right, mask=of_columns, other=0.0)
        if INTEGER:
            sums = tl.dot(a, tl.trans(b), sums, out_dtype=tl.int32)
        else:  # Hopper accumulates fp8 with fewer bits: add to float32 after each tile
            sums = tl.dot(a, tl.trans(b), sums, max_num_imprecise_acc=TILE_DEPTH)
        left += TILE_DEPTH
        right += TILE_DEPTH
    total = sums.to(tl.float32) * tl.load(scales + column, mask=column < COLUMNS, other=0.0)[None, :]
    _stored(total, x_scales, bias, out, row, column, rows, COLUMNS, True, BIAS)


@triton.jit(do_not_specialize=["rows"])
def multiply_nibbles(
    x,  # [rows, GROUPS * GROUP], int8 (INTEGER), float32 or bfloat16
    x_scales,  # float32 [rows], with INTEGER
    weight,  # uint8 [COLUMNS, GROUPS * GROUP / 2]
    scales,  # float32 [COLUMNS, GROUPS]
    zeros,  # uint8 [COLUMNS, GROUPS]
    bias,  # [COLUMNS], with BIAS
    out,  # [rows, COLUMNS]
    rows,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    INTEGER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Program (tile of rows, tile of columns), group by group: a group's weights are unpacked in registers."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    of_rows, of_columns = row < rows, column < COLUMNS
    DEPTH: tl.constexpr = GROUPS * GROUP
    left = x + row.to(tl.int64)[:, None] * DEPTH + tl.arange(0, GROUP)[None, :]
    right = weight + column.to(tl.int64)[:, None] * (DEPTH // 2) + tl.arange(0, GROUP // 2)[None, :]
    of_group = column.to(tl.int64) * GROUPS
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for group in range(GROUPS):
        a = tl.load(left, mask=of_rows[:, None], other=0.0)
        packed = tl.load(right, mask=of_columns[:, None], other=0)
        scale = tl.load(scales + of_group + group, mask=of_columns, other=0.0)
        zero = tl.load(zeros + of_group + group, mask=of_columns, other=0)
        levels = tl.reshape(tl.join(packed & 15, packed >> 4), [TILE_COLUMNS, GROUP]).to(tl.int8)
        levels = levels - zero.to(tl.int8)[:, None]
        if INTEGER:
            part = tl.dot(a, tl.trans(levels), out_dtype=tl.int32)
            total += part.to(tl.float32) * scale[None, :]
        else:
            exact = (levels.to(tl.float32) * scale[:, None]).to(a.dtype)
            total = tl.dot(a, tl.trans(exact), total, input_precision="ieee")
        left += GROUP
        right += GROUP // 2
    _stored(total, x_scales, bias, out, row, column, rows, COLUMNS, INTEGER, BIAS)
