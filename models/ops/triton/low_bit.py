# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Quantise tokens to eight bits, and multiply by low-bit weights. `models.ops.low_bit` defines the order of the
arithmetic.

Integer sums are exact, so tiles can depend on the number of rows without changing a bit, and so can the split of K
(int8 by int8). Four bits with floats: parts of K lie at fixed places of a matrix, and their sums are added in order,
whether one program computes all parts or each has its own. fp8 has one tile for all rows and no split.
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


@triton.jit
def _placed(sums, splits, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Where the sums of this tile's first split lie, and the tile's number."""
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    inside = tl.arange(0, TILE_ROWS)[:, None] * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    return sums + tile.to(tl.int64) * splits * (TILE_ROWS * TILE_COLUMNS) + inside, tile


@triton.jit
def _arrives_last(total, place, arrived, splits, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Store this split's sums. Whether all other splits of the tile have stored theirs."""
    tl.store(place + tl.program_id(2) * (TILE_ROWS * TILE_COLUMNS), total)
    tl.debug_barrier()  # all threads have stored before the program counts as arrived
    last = tl.atomic_add(arrived, 1, sem="acq_rel") + 1 == splits
    if last:
        tl.store(arrived, 0)  # for the next product
    return last


@triton.jit
def _added(place, kind: tl.constexpr, splits, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """The sums of all splits, added in order."""
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], kind)
    for split in range(splits):
        total += tl.load(place + split * (TILE_ROWS * TILE_COLUMNS), cache_modifier=".cg")
    return total


@triton.jit
def _scaled(sums, scales, x_scales, bias, out, row, column, rows, COLUMNS: tl.constexpr, BIAS: tl.constexpr):
    """The sums times each column's scale and each token's, plus bias, rounded."""
    total = sums.to(tl.float32) * tl.load(scales + column, mask=column < COLUMNS, other=0.0)[None, :]
    _stored(total, x_scales, bias, out, row, column, rows, COLUMNS, True, BIAS)


@triton.jit(do_not_specialize=["rows", "splits"])
def multiply_bytes(
    x,  # [rows, DEPTH], int8 or float8_e4m3fn
    x_scales,  # float32 [rows]
    weight,  # [COLUMNS, DEPTH], likewise
    scales,  # float32 [COLUMNS]
    bias,  # [COLUMNS], with BIAS
    out,  # [rows, COLUMNS]
    sums,  # int32 [tiles, splits, TILE_ROWS, TILE_COLUMNS], with SPLIT
    arrived,  # int32 [tiles], zeros before and after, with SPLIT
    rows,
    splits,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    INTEGER: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    """Program (tile of rows, tile of columns, split of DEPTH); tiles of rows that share weights follow one another.

    Of a tile's splits the program that arrives last adds all sums, which are integers: no bit depends on which it is,
    nor on how many there are.
    """
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    depth = tl.arange(0, TILE_DEPTH)
    of_rows, of_columns = (row < rows)[:, None], (column < COLUMNS)[:, None]
    begin, end = 0, DEPTH
    if SPLIT:
        parts: tl.constexpr = (DEPTH + TILE_DEPTH - 1) // TILE_DEPTH
        begin = parts * tl.program_id(2) // splits * TILE_DEPTH
        end = tl.minimum(parts * (tl.program_id(2) + 1) // splits * TILE_DEPTH, DEPTH)
    left = x + row.to(tl.int64)[:, None] * DEPTH + begin + depth[None, :]
    right = weight + column.to(tl.int64)[:, None] * DEPTH + begin + depth[None, :]
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32 if INTEGER else tl.float32)
    for start in range(begin, end, TILE_DEPTH):
        if DEPTH % TILE_DEPTH:
            inside = (start + depth < DEPTH)[None, :]
            a = tl.load(left, mask=of_rows & inside, other=0.0)
            b = tl.load(right, mask=of_columns & inside, other=0.0)
        else:
            a = tl.load(left, mask=of_rows, other=0.0)
            b = tl.load(right, mask=of_columns, other=0.0)
        if INTEGER:
            total = tl.dot(a, tl.trans(b), total, out_dtype=tl.int32)
        else:  # Hopper accumulates fp8 with fewer bits: add to float32 after each tile
            total = tl.dot(a, tl.trans(b), total, max_num_imprecise_acc=TILE_DEPTH)
        left += TILE_DEPTH
        right += TILE_DEPTH
    if SPLIT:
        place, tile = _placed(sums, splits, TILE_ROWS, TILE_COLUMNS)
        if _arrives_last(total, place, arrived + tile, splits, TILE_ROWS, TILE_COLUMNS):
            total = _added(place, tl.int32, splits, TILE_ROWS, TILE_COLUMNS)
            _scaled(total, scales, x_scales, bias, out, row, column, rows, COLUMNS, BIAS)
    else:
        _scaled(total, scales, x_scales, bias, out, row, column, rows, COLUMNS, BIAS)


@triton.jit(do_not_specialize=["rows"])
def multiply_nibbles(
    x,  # int8 [rows, GROUPS * GROUP]
    x_scales,  # float32 [rows]
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
        part = tl.dot(a, tl.trans(levels), out_dtype=tl.int32)
        total += part.to(tl.float32) * scale[None, :]
        left += GROUP
        right += GROUP // 2
    _stored(total, x_scales, bias, out, row, column, rows, COLUMNS, True, BIAS)


# Of four bytes: their low and their high halves, each as bfloat16 128 + half. 1.6 instructions per weight with the
# difference to the zero point; shifts and conversions of single weights take six.
_UNPACK: tl.constexpr = tl.constexpr("""{
.reg .b32 first, second, first_high, second_high;
prmt.b32 first, $4, 0, 0x4140;
prmt.b32 second, $4, 0, 0x4342;
shr.b32 first_high, first, 4;
shr.b32 second_high, second, 4;
lop3.b32 $0, first, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $1, second, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $2, first_high, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $3, second_high, 0x000f000f, 0x43004300, 0xea;
}""")


@triton.jit(do_not_specialize=["rows"])
def multiply_unpacked(
    x,  # float32 or bfloat16 [rows, GROUPS * GROUP]
    weight,  # uint8 [COLUMNS, GROUPS * GROUP / 2]
    scales,  # float32 [COLUMNS, GROUPS]
    zeros,  # uint8 [COLUMNS, GROUPS], below 16
    bias,  # [COLUMNS], with BIAS
    out,  # [rows, COLUMNS]
    sums,  # float32 [tiles, splits, TILE_ROWS, TILE_COLUMNS], with SPLIT
    arrived,  # int32 [tiles], zeros before and after, with SPLIT
    rows,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,  # groups
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Program (tile of rows, tile of columns, and with SPLIT a part of K), group by group.

    Even inputs meet low halves and odd ones high halves, so weights stay where they were loaded: no shuffle. Levels are
    exact in bfloat16, and a group's sums are scaled.
    """
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    of_rows, of_columns = row < rows, column < COLUMNS
    DEPTH: tl.constexpr = GROUPS * GROUP
    begin, end = 0, GROUPS
    if SPLIT:
        begin = tl.program_id(2) * PART
        end = tl.minimum(begin + PART, GROUPS)
    left = x + row.to(tl.int64)[:, None] * DEPTH + begin * GROUP + tl.arange(0, GROUP)[None, :]
    right = weight + begin * (GROUP // 2) + column.to(tl.int64)[:, None] * (DEPTH // 2)
    right += tl.arange(0, GROUP // 2)[None, :]
    of_group = column.to(tl.int64) * GROUPS
    whole = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for group in range(begin, end):
        a = tl.load(left, mask=of_rows[:, None], other=0.0)
        packed = tl.load(right, mask=of_columns[:, None], other=0)
        scale = tl.load(scales + of_group + group, mask=of_columns, other=0.0)
        zero = tl.load(zeros + of_group + group, mask=of_columns, other=0)
        even, odd = tl.split(tl.reshape(a, [TILE_ROWS, GROUP // 2, 2]))
        low, high = tl.inline_asm_elementwise(_UNPACK, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), True, 4)
        zero = (zero.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)[:, None]
        part = tl.dot(even, tl.trans((low - zero).to(a.dtype)), input_precision="ieee")
        part = tl.dot(odd, tl.trans((high - zero).to(a.dtype)), part, input_precision="ieee")
        total += part * scale[None, :]
        if not SPLIT and PART < GROUPS:
            ends = group % PART == PART - 1
            whole += tl.where(ends, total, 0.0)
            total = tl.where(ends, 0.0, total)
        left += GROUP
        right += GROUP // 2
    if SPLIT:
        splits = tl.num_programs(2)
        place, tile = _placed(sums, splits, TILE_ROWS, TILE_COLUMNS)
        if _arrives_last(total, place, arrived + tile, splits, TILE_ROWS, TILE_COLUMNS):
            total = _added(place, tl.float32, splits, TILE_ROWS, TILE_COLUMNS)
            _stored(total, x, bias, out, row, column, rows, COLUMNS, False, BIAS)
    else:
        _stored(whole + total, x, bias, out, row, column, rows, COLUMNS, False, BIAS)
