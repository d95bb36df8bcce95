# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Batch-invariant matrix product: fixed tiles, K summed in one fixed order, whatever the number of rows.

Tiles depend on the weight's shape and dtype alone, and one program owns its outputs: no split of K, no atomics.
"""

import triton
import triton.language as tl

from models.ops.triton.overlap import after_previous


@triton.jit(do_not_specialize=["rows"])
def linear(
    x,  # [rows, DEPTH]
    weight,  # [COLUMNS, DEPTH]
    bias,  # [COLUMNS], with BIAS
    out,  # [rows, COLUMNS]
    rows,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of rows, tile of columns); tiles of rows that share weights follow one another."""
    if PDL:
        after_previous()
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    depth = tl.arange(0, TILE_DEPTH)
    of_rows, of_columns = (row < rows)[:, None], (column < COLUMNS)[:, None]
    left = x + row.to(tl.int64)[:, None] * DEPTH + depth[None, :]
    right = weight + column.to(tl.int64)[:, None] * DEPTH + depth[None, :]
    sums = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, DEPTH, TILE_DEPTH):
        if DEPTH % TILE_DEPTH:
            inside = (start + depth < DEPTH)[None, :]
            a = tl.load(left, mask=of_rows & inside, other=0.0)
            b = tl.load(right, mask=of_columns & inside, other=0.0)
        else:
            a = tl.load(left, mask=of_rows, other=0.0)
            b = tl.load(right, mask=of_columns, other=0.0)
        sums = tl.dot(a, tl.trans(b), sums, input_precision=PRECISION)
        left += TILE_DEPTH
        right += TILE_DEPTH
    if BIAS:
        sums += tl.load(bias + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=of_rows & (column < COLUMNS)[None, :])
