# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Paged attention over packed ragged rows: splits of the context and their merge, in one kernel or in two.

A row's result is a function of its query, its context and its row of the tree mask. Splits are at absolute positions,
and blocks of keys at fixed places of a split. Partial sums are merged in the order of positions. The same instructions
sum every row, wherever it is in a tile.

With many tiles, a program visits all splits of its rows and merges them itself. With few, programs of `attend` share
the splits and `merge_splits` follows. Both give the same bits: they share functions and are compiled without implicit
fused multiply-adds. Slots that no query of the request may see are never read, nor table entries behind its context.
"""

import triton
import triton.language as tl

from models.ops.triton.overlap import after_previous

_PER_CALL = ["rows", "requests", "table_stride", "table_step", "mask_width", "one_tile", "splits"]
_NOTHING = tl.constexpr(-1e30)  # peak of a row that has seen no key: finite, so that differences are not NaN
_MASK_BITS = tl.constexpr(64)


@triton.jit
def _tile(query_offsets, requests, tile, one_tile, TILE_ROWS: tl.constexpr):
    """(request, its first row in this tile): tiles of request b begin at query_offsets[b] // TILE_ROWS + b."""
    low = tl.minimum(tile, requests - 1)
    inside = (tile - low) * TILE_ROWS
    if one_tile == 0:
        low, high = requests * 0, requests
        while high - low > 1:
            middle = (low + high) // 2
            begins = tl.load(query_offsets + middle) // TILE_ROWS + middle
            low, high = tl.where(begins <= tile, middle, low), tl.where(begins <= tile, high, middle)
        inside = (tile - tl.load(query_offsets + low) // TILE_ROWS - low) * TILE_ROWS
    return low, inside


@triton.jit
def _merged(peak, total, sums, other_peak, other_total, other_sums):
    """Merge two partial softmaxes of the same rows, the earlier first; an empty one leaves the other unchanged."""
    new = tl.maximum(peak, other_peak)
    mine, theirs = tl.exp2(peak - new), tl.exp2(other_peak - new)
    saw = other_total > 0
    total = tl.where(saw, total * mine + other_total * theirs, total)
    sums = tl.where(saw[:, None], sums * mine[:, None] + other_sums * theirs[:, None], sums)
    return tl.where(saw, new, peak), total, sums


@triton.jit
def _mask_bits(tree_mask, mask_width, count, live, TREE: tl.constexpr):
    """Bit j: whether the row sees query row j of its request. At most 64 columns."""
    bit = tl.arange(0, _MASK_BITS)
    inside = live[:, None] & (bit < tl.minimum(count, mask_width))[None, :]
    allowed = tl.load(tree_mask[:, None] + bit[None, :], mask=inside, other=0)
    return tl.sum((allowed != 0).to(tl.int64) << bit.to(tl.int64)[None, :], 1)


@triton.jit
def _split(
    query,
    k_cache,
    v_cache,
    block_table,
    table_step,
    mask_rows,
    bits,
    mask_width,
    split,
    stop,
    start,
    count,
    row,
    live,
    head,
    scale_log2,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Partial softmax of a tile's rows over positions [split, min(split + SPLIT, stop)): peaks, totals, sums."""
    key = tl.arange(0, KEYS)
    column = tl.arange(0, WIDTH)
    wide = column < D
    peak = tl.full([TILE], _NOTHING, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, WIDTH], tl.float32)
    for block in range(split, tl.minimum(split + SPLIT, stop), KEYS):
        position = block + key
        known = position < stop
        page = tl.load(block_table + (position // BLOCK_TOKENS) * table_step, mask=known, other=0)
        slot = page.to(tl.int64) * BLOCK_TOKENS + position % BLOCK_TOKENS
        source = slot[:, None] * (HKV * D) + head * D + column[None, :]
        keys = tl.load(k_cache + source, mask=known[:, None] & wide[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale_log2
        if TREE == 0:
            sees = position[None, :] <= (start + row)[:, None]
        else:
            among = position - start
            if TREE == 1:
                allowed = (bits[:, None] >> tl.minimum(tl.maximum(among, 0), 63)[None, :].to(tl.int64)) & 1
            else:
                inside = live[:, None] & ((among >= 0) & (among < tl.minimum(count, mask_width)))[None, :]
                allowed = tl.load(mask_rows[:, None] + among[None, :], mask=inside, other=0)
            sees = (among < 0)[None, :] | (allowed != 0)
        scores = tl.where(sees & known[None, :], scores, float("-inf"))
        new = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        old = tl.exp2(peak - new)
        total = total * old + tl.sum(weights, 1)
        values = tl.load(v_cache + source, mask=known[:, None] & wide[None, :], other=0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums * old[:, None], input_precision=PRECISION)
        peak = new
    return peak, total, sums


@triton.jit
def _store_partial(
    sums,
    stats,
    split,
    splits,
    head,
    rows,
    first_row,
    live,
    peak,
    total,
    partial,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write one split's partial result of a tile whose rows begin at `first_row`."""
    place = tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    one_head = rows.to(tl.int64) * GROUP
    to = (split * HKV + head) * one_head + first_row.to(tl.int64) * GROUP
    tl.store(sums + to * WIDTH + place[:, None] * WIDTH + column[None, :], partial, mask=live[:, None])
    tl.store(stats + to + place, peak, mask=live)
    tl.store(stats + to + splits * HKV * one_head + place, total, mask=live)


@triton.jit(do_not_specialize=_PER_CALL)
def attend(
    q,  # [rows, HQ, D]
    k_cache,  # [slots, HKV, D]
    v_cache,
    block_tables,  # int32 [requests, blocks], of any strides
    query_offsets,  # int32 [requests + 1]
    context_lens,  # int32 [requests]
    tree_mask,  # uint8 [rows, mask_width]
    out,  # [rows, HQ, D]; with APART float32 sums [splits, HKV, rows * GROUP, WIDTH]
    stats,  # float32 peaks and totals [2, splits, HKV, rows * GROUP], with APART
    rows,
    requests,
    table_stride,
    table_step,
    mask_width,
    one_tile,
    splits,
    scale_log2,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    TREE: tl.constexpr,  # 0: causal; 1: a mask of at most 64 columns; 2: a wider one
    APART: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile, KV head, lane): partial results of every lanes-th split (APART), or the whole context's result."""
    if PDL:
        after_previous()
    tile, head, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HQ // HKV
    TILE_ROWS: tl.constexpr = TILE // GROUP
    place = tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    wide = column < D
    if not APART:  # noqa: SIM102 - a separate constant test: otherwise the branch is compiled
        if tile >= _tiles(query_offsets, requests, one_tile, TILE_ROWS):
            _clear(out, query_offsets, rows, requests, tile, one_tile, head, HQ, HKV, D, TILE, WIDTH)
            return
    request, inside = _tile(query_offsets, requests, tile, one_tile, TILE_ROWS)
    first = tl.load(query_offsets + request)
    count = tl.load(query_offsets + request + 1) - first
    if inside >= count:
        return
    context = tl.load(context_lens + request)
    start = context - count
    stop = context if TREE else start + tl.minimum(inside + TILE_ROWS, count)
    begin = lane * SPLIT
    if begin >= stop:
        return
    row = inside + place // GROUP
    live = (place < TILE_ROWS * GROUP) & (row < count)
    at = (first + row).to(tl.int64) * HQ + head * GROUP + place % GROUP
    query = tl.load(q + at[:, None] * D + column[None, :], mask=live[:, None] & wide[None, :], other=0.0)
    mask_rows = tree_mask + (first + row).to(tl.int64) * mask_width
    bits = _mask_bits(mask_rows, mask_width, count, live, TREE) if TREE == 1 else 0
    block_table = block_tables + request.to(tl.int64) * table_stride
    if APART:
        for split in range(begin, stop, tl.num_programs(2) * SPLIT):
            peak, total, sums = _split(
                query, k_cache, v_cache, block_table, table_step, mask_rows, bits, mask_width, split, stop, start,
                count, row, live, head, scale_log2, HKV, D, BLOCK_TOKENS, SPLIT, TILE, KEYS, WIDTH, TREE, PRECISION,
            )  # fmt: skip
            _store_partial(
                out, stats, split // SPLIT, splits, head, rows, first + inside, live, peak, total, sums, HKV, GROUP,
                TILE, WIDTH,
            )  # fmt: skip
    else:
        peak = tl.full([TILE], _NOTHING, tl.float32)
        total = tl.zeros([TILE], tl.float32)
        sums = tl.zeros([TILE, WIDTH], tl.float32)
        for split in range(begin, stop, SPLIT):
            split_peak, split_total, split_sums = _split(
                query, k_cache, v_cache, block_table, table_step, mask_rows, bits, mask_width, split, stop, start,
                count, row, live, head, scale_log2, HKV, D, BLOCK_TOKENS, SPLIT, TILE, KEYS, WIDTH, TREE, PRECISION,
            )  # fmt: skip
            peak, total, sums = _merged(peak, total, sums, split_peak, split_total, split_sums)
        result = sums / tl.where(live, total, 1.0)[:, None]
        tl.store(
            out + at[:, None] * D + column[None, :], result.to(out.dtype.element_ty), mask=live[:, None] & wide[None, :]
        )


@triton.jit(do_not_specialize=_PER_CALL)
def attend_items(
    q,  # as of `attend`, as are all up to context_lens
    k_cache,
    v_cache,
    block_tables,
    query_offsets,
    context_lens,
    work,  # int32, of `work.WorkList`
    tree_mask,
    sums,  # float32 [splits, HKV, rows * GROUP, WIDTH]
    stats,  # float32 [2, splits, HKV, rows * GROUP]
    rows,
    table_stride,
    table_step,
    mask_width,
    splits,
    scale_log2,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    TREE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (share of the work, KV head): partial results of the splits that the list gives it, as `attend` has."""
    if PDL:
        after_previous()
    program, head = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = HQ // HKV
    TILE_ROWS: tl.constexpr = TILE // GROUP
    place = tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    wide = column < D
    items = work + tl.num_programs(0) + 1
    for item in range(tl.load(work + program), tl.load(work + program + 1)):
        request = tl.load(items + item * 4)
        inside = tl.load(items + item * 4 + 1)
        begin = tl.load(items + item * 4 + 2) * SPLIT
        end = begin + tl.load(items + item * 4 + 3) * SPLIT
        first = tl.load(query_offsets + request)
        count = tl.load(query_offsets + request + 1) - first
        context = tl.load(context_lens + request)
        start = context - count
        stop = context if TREE else start + tl.minimum(inside + TILE_ROWS, count)
        row = inside + place // GROUP
        live = (place < TILE_ROWS * GROUP) & (row < count)
        at = (first + row).to(tl.int64) * HQ + head * GROUP + place % GROUP
        query = tl.load(q + at[:, None] * D + column[None, :], mask=live[:, None] & wide[None, :], other=0.0)
        mask_rows = tree_mask + (first + row).to(tl.int64) * mask_width
        bits = _mask_bits(mask_rows, mask_width, count, live, TREE) if TREE == 1 else 0
        block_table = block_tables + request.to(tl.int64) * table_stride
        for split in range(begin, end, SPLIT):
            peak, total, partial = _split(
                query, k_cache, v_cache, block_table, table_step, mask_rows, bits, mask_width, split, stop, start,
                count, row, live, head, scale_log2, HKV, D, BLOCK_TOKENS, SPLIT, TILE, KEYS, WIDTH, TREE, PRECISION,
            )  # fmt: skip
            _store_partial(
                sums, stats, split // SPLIT, splits, head, rows, first + inside, live, peak, total, partial, HKV, GROUP,
                TILE, WIDTH,
            )  # fmt: skip


@triton.jit
def _tiles(query_offsets, requests, one_tile, TILE_ROWS: tl.constexpr):
    """Number of tiles of all requests; later programs clear padding rows."""
    return requests if one_tile else tl.load(query_offsets + requests) // TILE_ROWS + requests


@triton.jit
def _clear(
    out,
    query_offsets,
    rows,
    requests,
    tile,
    one_tile,
    head,
    HQ: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write zeros to a tile of padding rows, heads [head * HQ // HEADS, ...) of them."""
    GROUP: tl.constexpr = HQ // HEADS
    TILE_ROWS: tl.constexpr = TILE // GROUP
    place = tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    tiles = _tiles(query_offsets, requests, one_tile, TILE_ROWS)
    row = tl.load(query_offsets + requests) + (tile - tiles) * TILE_ROWS + place // GROUP
    live = (place < TILE_ROWS * GROUP) & (row < rows)
    at = row.to(tl.int64) * HQ + head * GROUP + place % GROUP
    nothing = tl.zeros([TILE, WIDTH], out.dtype.element_ty)
    tl.store(out + at[:, None] * D + column[None, :], nothing, mask=live[:, None] & (column < D)[None, :])


@triton.jit(do_not_specialize=_PER_CALL)
def merge_splits(
    sums,  # float32 [splits, HKV, rows * GROUP, WIDTH]
    stats,  # float32 [2, splits, HKV, rows * GROUP]
    query_offsets,
    context_lens,
    out,  # [rows, HQ, D]
    rows,
    requests,
    one_tile,
    splits,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    TREE: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile, KV head, head of its group)."""
    if PDL:
        after_previous()
    tile, head, member = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HQ // HKV
    TILE_ROWS: tl.constexpr = TILE // GROUP
    PLACES: tl.constexpr = triton.next_power_of_2(TILE_ROWS)
    if tile >= _tiles(query_offsets, requests, one_tile, TILE_ROWS):
        if member == 0:
            _clear(out, query_offsets, rows, requests, tile, one_tile, head, HQ, HKV, D, TILE, WIDTH)
        return
    request, inside = _tile(query_offsets, requests, tile, one_tile, TILE_ROWS)
    first = tl.load(query_offsets + request)
    count = tl.load(query_offsets + request + 1) - first
    if inside >= count:
        return
    place = tl.arange(0, PLACES)
    column = tl.arange(0, WIDTH)
    live = (place < TILE_ROWS) & (inside + place < count)
    context = tl.load(context_lens + request)
    stop = context if TREE else context - count + tl.minimum(inside + TILE_ROWS, count)
    one_head = rows.to(tl.int64) * GROUP
    source = head * one_head + (first + inside).to(tl.int64) * GROUP + member
    peak = tl.full([PLACES], _NOTHING, tl.float32)
    total = tl.zeros([PLACES], tl.float32)
    all_sums = tl.zeros([PLACES, WIDTH], tl.float32)
    for _ in tl.range(0, tl.cdiv(stop, SPLIT), num_stages=AHEAD):
        at = source + place * GROUP
        split_peak = tl.load(stats + at, mask=live, other=_NOTHING)
        split_total = tl.load(stats + splits * HKV * one_head + at, mask=live, other=0.0)
        split_sums = tl.load(sums + at[:, None] * WIDTH + column[None, :], mask=live[:, None], other=0.0)
        peak, total, all_sums = _merged(peak, total, all_sums, split_peak, split_total, split_sums)
        source += HKV * one_head
    result = all_sums / tl.where(live, total, 1.0)[:, None]
    at = (first + inside + place).to(tl.int64) * HQ + head * GROUP + member
    tl.store(
        out + at[:, None] * D + column[None, :],
        result.to(out.dtype.element_ty),
        mask=live[:, None] & (column < D)[None, :],
    )
