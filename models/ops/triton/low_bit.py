# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Multiply tokens by low-bit weights. `models.ops.low_bit` defines the order of the arithmetic.

Integer sums are exact, so tiles can depend on the number of rows without changing a bit, and so can the split of K
(int8 by int8). Of int8 by four bits, sums of groups are floats that are added in the order of groups, however K is
split. Four bits with floats, and fp8: parts of K lie at fixed places of a matrix, and their sums are added in order,
whether one program computes all parts or each has its own. fp8 has one tile for all rows.
"""

import triton
import triton.language as tl

from models.ops.triton.overlap import after_previous, ask_for

_LINES: tl.constexpr = tl.constexpr(
    4
)  # of 128 bytes of each column, asked for before the wait: what fills an idle memory


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
def _placed(sums, slots, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Where the first sums of this tile lie, of `slots`, and the tile's number."""
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    inside = tl.arange(0, TILE_ROWS)[:, None] * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    return sums + tile.to(tl.int64) * slots * (TILE_ROWS * TILE_COLUMNS) + inside, tile


@triton.jit
def _arrives_last(arrived, splits):
    """Whether all other splits of the tile have stored their sums."""
    tl.debug_barrier()  # all threads have stored before the program counts as arrived
    last = tl.atomic_add(arrived, 1, sem="acq_rel") + 1 == splits
    if last:
        tl.store(arrived, 0)  # for the next product
    return last


@triton.jit
def _added(place, live, kind: tl.constexpr, slots, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """The sums of all slots, added in order."""
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], kind)
    for slot in range(slots):
        total += tl.load(place + slot * (TILE_ROWS * TILE_COLUMNS), mask=live, other=0, cache_modifier=".cg")
    return total


@triton.jit
def _scaled(sums, scales, x_scales, bias, out, row, column, rows, COLUMNS: tl.constexpr, BIAS: tl.constexpr):
    """The sums times each column's scale and each token's, plus bias, rounded."""
    total = sums.to(tl.float32) * tl.load(scales + column, mask=column < COLUMNS, other=0.0)[None, :]
    _stored(total, x_scales, bias, out, row, column, rows, COLUMNS, True, BIAS)


@triton.jit
def _summed(
    x,
    weight,
    row,
    column,
    rows,
    begin,
    end,
    kind: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    """The sums over [begin, end) of DEPTH."""
    depth = tl.arange(0, TILE_DEPTH)
    of_rows, of_columns = (row < rows)[:, None], (column < COLUMNS)[:, None]
    left = x + row.to(tl.int64)[:, None] * DEPTH + begin + depth[None, :]
    right = weight + column.to(tl.int64)[:, None] * DEPTH + begin + depth[None, :]
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], kind)
    for start in range(begin, end, TILE_DEPTH):
        if DEPTH % TILE_DEPTH:
            inside = (start + depth < DEPTH)[None, :]
            a = tl.load(left, mask=of_rows & inside, other=0.0)
            b = tl.load(right, mask=of_columns & inside, other=0.0)
        else:
            a = tl.load(left, mask=of_rows, other=0.0)
            b = tl.load(right, mask=of_columns, other=0.0)
        if kind == tl.int32:
            total = tl.dot(a, tl.trans(b), total, out_dtype=tl.int32)
        else:  # Hopper accumulates fp8 with fewer bits: add to float32 after each tile
            total = tl.dot(a, tl.trans(b), total, max_num_imprecise_acc=TILE_DEPTH)
        left += TILE_DEPTH
        right += TILE_DEPTH
    return total


@triton.jit(do_not_specialize=["rows", "splits"])
def multiply_bytes(
    x,  # [rows, DEPTH], int8 or float8_e4m3fn
    x_scales,  # float32 [rows]
    weight,  # [COLUMNS, DEPTH], likewise
    scales,  # float32 [COLUMNS]
    bias,  # [COLUMNS], with BIAS
    out,  # [rows, COLUMNS]
    sums,  # int32 or float32 [tiles, splits, TILE_ROWS, TILE_COLUMNS], with SPLIT
    arrived,  # int32 [tiles], zeros before and after, with SPLIT
    rows,
    splits,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,  # of DEPTH, in TILE_DEPTHs: fp8
    BIAS: tl.constexpr,
    INTEGER: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of rows, tile of columns, split of DEPTH); tiles of rows that share weights follow one another.

    Of a tile's splits the program that arrives last adds all sums in order, so no bit depends on which it is; nor on
    how many there are, since integers are exact and parts of fp8 are the splits.
    """
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    of_rows = (row < rows)[:, None]
    STEPS: tl.constexpr = (DEPTH + TILE_DEPTH - 1) // TILE_DEPTH
    begin, end = 0, DEPTH
    if SPLIT:
        if INTEGER:
            begin = STEPS * tl.program_id(2) // splits * TILE_DEPTH
            end = tl.minimum(STEPS * (tl.program_id(2) + 1) // splits * TILE_DEPTH, DEPTH)
        else:
            begin = tl.program_id(2) * (PART * TILE_DEPTH)
            end = tl.minimum(begin + PART * TILE_DEPTH, DEPTH)
    if PDL:
        ask_for(weight, column, begin, COLUMNS, DEPTH, _LINES)
        after_previous()
    kind: tl.constexpr = tl.int32 if INTEGER else tl.float32
    if SPLIT or INTEGER or PART >= STEPS:
        total = _summed(
            x, weight, row, column, rows, begin, end, kind, COLUMNS, DEPTH, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH
        )
    else:
        total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        for start in range(0, DEPTH, PART * TILE_DEPTH):
            until = tl.minimum(start + PART * TILE_DEPTH, DEPTH)
            total += _summed(
                x, weight, row, column, rows, start, until, kind, COLUMNS, DEPTH, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH
            )
    if SPLIT:
        place, tile = _placed(sums, splits, TILE_ROWS, TILE_COLUMNS)
        tl.store(place + tl.program_id(2) * (TILE_ROWS * TILE_COLUMNS), total, mask=of_rows)
        if _arrives_last(arrived + tile, splits):
            total = _added(place, of_rows, kind, splits, TILE_ROWS, TILE_COLUMNS)
            _scaled(total, scales, x_scales, bias, out, row, column, rows, COLUMNS, BIAS)
    else:
        _scaled(total, scales, x_scales, bias, out, row, column, rows, COLUMNS, BIAS)


# Of four bytes: their low and their high halves, less the zero point of each, as bytes. 0.9 instructions per weight;
# shifts, conversions and shuffles of single weights take six. 128 is added before the difference, so that no byte
# borrows from the next, and taken off after it.
_LEVELS_OF: tl.constexpr = tl.constexpr("""{
.reg .b32 first, second;
shr.b32 second, $2, 4;
lop3.b32 first, $2, 0x0f0f0f0f, 0x80808080, 0xea;
lop3.b32 second, second, 0x0f0f0f0f, 0x80808080, 0xea;
sub.u32 first, first, $3;
sub.u32 second, second, $3;
xor.b32 $0, first, 0x80808080;
xor.b32 $1, second, 0x80808080;
}""")


@triton.jit(do_not_specialize=["rows", "splits"])
def multiply_nibbles(
    x,  # int8 [rows, GROUPS * GROUP]
    x_scales,  # float32 [rows]
    weight,  # uint8 [COLUMNS, GROUPS * GROUP / 2]
    scales,  # float32 [COLUMNS, GROUPS]
    zeros,  # uint8 [COLUMNS, GROUPS], below 16
    bias,  # [COLUMNS], with BIAS
    out,  # [rows, COLUMNS]
    sums,  # float32 [tiles, slots, TILE_ROWS, TILE_COLUMNS], with SPLIT: the first split's, and of each later group
    arrived,  # int32 [tiles], zeros before and after, with SPLIT
    rows,
    splits,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of rows, tile of columns, split of K), group by group.

    Even inputs meet low halves and odd ones high halves, so weights stay where they were loaded: no shuffle. Groups are
    added in order: the first split adds its own, and the program that arrives last all that follow.
    """
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    of_rows, of_columns = (row < rows)[:, None], column < COLUMNS
    DEPTH: tl.constexpr = GROUPS * GROUP
    TILE: tl.constexpr = TILE_ROWS * TILE_COLUMNS
    begin, end = 0, GROUPS
    if SPLIT:
        begin = GROUPS * tl.program_id(2) // splits
        end = GROUPS * (tl.program_id(2) + 1) // splits
        own = GROUPS // splits  # of the first split
        slots = GROUPS - own + 1
        place, tile = _placed(sums, slots, TILE_ROWS, TILE_COLUMNS)
    if PDL:
        ask_for(weight, column, begin * (GROUP // 2), COLUMNS, DEPTH // 2, _LINES)
        ask_for(scales, column, begin, COLUMNS, GROUPS, _LINES)
        ask_for(zeros, column, begin, COLUMNS, GROUPS, 1)
        after_previous()
    left = x + row.to(tl.int64)[:, None] * DEPTH + begin * GROUP + tl.arange(0, GROUP)[None, :]
    right = weight + begin * (GROUP // 2) + column.to(tl.int64)[:, None] * (DEPTH // 2)
    right += tl.arange(0, GROUP // 2)[None, :]
    of_group = column.to(tl.int64) * GROUPS
    AHEAD: tl.constexpr = TILE_ROWS < 128  # else registers do not suffice
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    scale = tl.load(scales + of_group + begin, mask=of_columns, other=0.0)
    for group in range(begin, end):
        a = tl.load(left, mask=of_rows, other=0.0)
        packed = tl.load(right, mask=of_columns[:, None], other=0)
        # A scale is loaded a group ahead. A zero point that a loop carries would give the weights another layout.
        if AHEAD:
            next_scale = tl.load(scales + of_group + group + 1, mask=of_columns & (group + 1 < end), other=0.0)
        else:
            scale = tl.load(scales + of_group + group, mask=of_columns, other=0.0)
        zero = tl.load(zeros + of_group + group, mask=of_columns, other=0)
        even, odd = tl.split(tl.reshape(a, [TILE_ROWS, GROUP // 2, 2]))
        low, high = tl.inline_asm_elementwise(
            _LEVELS_OF, "=r,=r,r,r", [packed, zero[:, None]], (tl.int8, tl.int8), True, 4
        )
        part = tl.dot(even, tl.trans(low), out_dtype=tl.int32)
        part = tl.dot(odd, tl.trans(high), part, out_dtype=tl.int32)
        scaled = part.to(tl.float32) * scale[None, :]
        total += scaled
        if SPLIT:
            tl.store(place + (group - own + 1) * TILE, scaled, mask=of_rows & (group >= own))
        if AHEAD:
            scale = next_scale
        left += GROUP
        right += GROUP // 2
    if SPLIT:
        tl.store(place, total, mask=of_rows & (tl.program_id(2) == 0))
        if _arrives_last(arrived + tile, splits):
            total = _added(place, of_rows, tl.float32, slots, TILE_ROWS, TILE_COLUMNS)
            _stored(total, x_scales, bias, out, row, column, rows, COLUMNS, True, BIAS)
    else:
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
    PDL: tl.constexpr,
):
    """Program (tile of rows, tile of columns, and with SPLIT a part of K), group by group.

    Even inputs meet low halves and odd ones high halves, so weights stay where they were loaded: no shuffle. Levels are
    exact in bfloat16, and a group's sums are scaled.
    """
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    of_rows, of_columns = (row < rows)[:, None], column < COLUMNS
    DEPTH: tl.constexpr = GROUPS * GROUP
    begin, end = 0, GROUPS
    if SPLIT:
        begin = tl.program_id(2) * PART
        end = tl.minimum(begin + PART, GROUPS)
    if PDL:
        ask_for(weight, column, begin * (GROUP // 2), COLUMNS, DEPTH // 2, _LINES)
        ask_for(scales, column, begin, COLUMNS, GROUPS, _LINES)
        ask_for(zeros, column, begin, COLUMNS, GROUPS, 1)
        after_previous()
    left = x + row.to(tl.int64)[:, None] * DEPTH + begin * GROUP + tl.arange(0, GROUP)[None, :]
    right = weight + begin * (GROUP // 2) + column.to(tl.int64)[:, None] * (DEPTH // 2)
    right += tl.arange(0, GROUP // 2)[None, :]
    of_group = column.to(tl.int64) * GROUPS
    whole = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    scale = tl.load(scales + of_group + begin, mask=of_columns, other=0.0)
    for group in range(begin, end):
        a = tl.load(left, mask=of_rows, other=0.0)
        packed = tl.load(right, mask=of_columns[:, None], other=0)
        # A scale is loaded a group ahead. A zero point that a loop carries would give the weights another layout.
        next_scale = tl.load(scales + of_group + group + 1, mask=of_columns & (group + 1 < end), other=0.0)
        zero = tl.load(zeros + of_group + group, mask=of_columns, other=0)
        even, odd = tl.split(tl.reshape(a, [TILE_ROWS, GROUP // 2, 2]))
        low, high = tl.inline_asm_elementwise(_UNPACK, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), True, 4)
        offset = (zero.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)[:, None]
        part = tl.dot(even, tl.trans((low - offset).to(a.dtype)), input_precision="ieee")
        part = tl.dot(odd, tl.trans((high - offset).to(a.dtype)), part, input_precision="ieee")
        total += part * scale[None, :]
        if not SPLIT and PART < GROUPS:
            ends = group % PART == PART - 1
            whole += tl.where(ends, total, 0.0)
            total = tl.where(ends, 0.0, total)
        scale = next_scale
        left += GROUP
        right += GROUP // 2
    if SPLIT:
        splits = tl.num_programs(2)
        place, tile = _placed(sums, splits, TILE_ROWS, TILE_COLUMNS)
        tl.store(place + tl.program_id(2) * (TILE_ROWS * TILE_COLUMNS), total, mask=of_rows)
        if _arrives_last(arrived + tile, splits):
            total = _added(place, of_rows, tl.float32, splits, TILE_ROWS, TILE_COLUMNS)
            _stored(total, x, bias, out, row, column, rows, COLUMNS, False, BIAS)
    else:
        _stored(whole + total, x, bias, out, row, column, rows, COLUMNS, False, BIAS)
