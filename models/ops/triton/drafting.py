# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Kernels between a drafter's passes: joined inputs, and trees that grow by the best nodes. One launch each.

Candidates are few (at most some hundred per request), so every program ranks them all by pairwise comparison: no sort,
no second kernel, no dependence on order. `models.ops.drafting` defines the results.
"""

import triton
import triton.language as tl


@triton.jit
def draft_inputs(
    tokens,  # int64 [rows]
    embedding,  # [V, SIZE]
    features,  # [rows, SIZE], rows FEATURE_STRIDE apart
    token_norm,  # [SIZE], with NORM
    feature_norm,
    out,  # [rows, 2 SIZE]
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURE_STRIDE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Program (row, half): the embedding of its token, or its feature."""
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    inside = column < SIZE
    if half == 0:
        source, weights = embedding + tl.load(tokens + row) * SIZE, token_norm
    else:
        source, weights = features + row * FEATURE_STRIDE, feature_norm
    values = tl.load(source + column, mask=inside, other=0.0)
    if NORM:
        wide = values.to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
        weight = tl.load(weights + column, mask=inside, other=0.0).to(tl.float32)
        values = (normed * weight).to(values.dtype)
    tl.store(out + row * (2 * SIZE) + half * SIZE + column, values, mask=inside)


@triton.jit
def _scores(logprobs, paths, request, candidate, inside, C: tl.constexpr, EACH: tl.constexpr, ROOT: tl.constexpr):
    """Log-probabilities of the paths to candidates of a level; -inf outside."""
    found = tl.load(logprobs + request * C + candidate, mask=inside, other=float("-inf"))
    if not ROOT:
        found += tl.load(paths + request * (C // EACH) + candidate // EACH, mask=inside, other=0.0)
    return found


@triton.jit
def tree_feed(
    drawn,  # int64 [requests, C]
    logprobs,  # float32 [requests, C]
    newest,  # int64 [requests, K]
    paths,  # float32 [requests, K]
    outputs,  # [requests, max(FED, 1), SIZE]
    fed_tokens,  # int64 [requests, FED]
    fed_hidden,  # [requests, FED, SIZE]
    fed_mask,  # uint8 [requests, FED, FED]
    node_tokens,  # int64 [requests, NODES]
    node_parents,
    node_scores,  # float32
    tokens,  # int64 [requests, FED + K]
    hidden,  # [requests, FED + K, SIZE]
    mask,  # uint8 [requests, FED + K, FED + K]
    new_newest,  # int64 [requests, K]
    new_paths,  # float32 [requests, K]
    FIRST: tl.constexpr,
    NODES: tl.constexpr,
    C: tl.constexpr,
    CANDIDATES: tl.constexpr,  # C, to the next power of two
    K: tl.constexpr,
    FED: tl.constexpr,
    ROWS: tl.constexpr,  # FED + K, to the next power of two
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROOT: tl.constexpr,
):
    """Program (request, row): copies a row that was fed before, or selects the node for the new row."""
    request, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, other = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    total: tl.constexpr = FED + K
    wide = column < SIZE
    to = request * total + row
    if row < FED:
        before = request * FED + row
        tl.store(tokens + to, tl.load(fed_tokens + before))
        tl.store(hidden + to * SIZE + column, tl.load(fed_hidden + before * SIZE + column, mask=wide), mask=wide)
        sees = tl.load(fed_mask + before * FED + other, mask=other < FED, other=0)
        tl.store(mask + to * total + other, sees, mask=other < total)
    else:
        each: tl.constexpr = C // K if C > K else 1
        place = row - FED
        candidate = tl.arange(0, CANDIDATES)
        inside = candidate < C
        scores = _scores(logprobs, paths, request, candidate, inside, C, each, ROOT)
        # Ranks by comparison, row by row: the other candidate's score against all.
        rank = tl.zeros([CANDIDATES], tl.int32)
        for one in range(C):
            score = tl.load(logprobs + request * C + one)
            if not ROOT:
                score += tl.load(paths + request * (C // each) + one // each)
            rank += ((score > scores) | ((score == scores) & (one < candidate))).to(tl.int32)
        # NaN scores can share ranks or leave gaps: the default then is a valid index.
        chosen = tl.min(tl.where(inside & (rank == place), candidate, C - 1), 0)
        path = tl.load(logprobs + request * C + chosen)
        if not ROOT:
            path += tl.load(paths + request * (C // each) + chosen // each)
        tl.store(tokens + to, tl.load(drawn + request * C + chosen))
        tl.store(new_newest + request * K + place, (FIRST + chosen).to(tl.int64))
        tl.store(new_paths + request * K + place, path)
        if FED:
            above = FED - K + chosen // K
            sees = tl.load(fed_mask + (request * FED + above) * FED + other, mask=other < FED, other=0)
            source = outputs + (request * FED + above) * SIZE
        else:
            sees = tl.zeros([ROWS], tl.uint8)
            source = outputs + request * SIZE
        sees = tl.where(other == row, 1, sees).to(tl.uint8)
        tl.store(mask + to * total + other, sees, mask=other < total)
        tl.store(hidden + to * SIZE + column, tl.load(source + column, mask=wide), mask=wide)
        if place == 0:
            node = request * NODES + FIRST + candidate
            tl.store(node_tokens + node, tl.load(drawn + request * C + candidate, mask=inside), mask=inside)
            tl.store(node_scores + node, scores, mask=inside)
            if ROOT:
                parent = tl.full([CANDIDATES], -1, tl.int64)
            else:
                parent = tl.load(newest + request * (C // each) + candidate // each, mask=inside, other=0)
            tl.store(node_parents + node, parent, mask=inside)


@triton.jit
def tree_best(
    drawn,  # int64 [requests, C]
    logprobs,  # float32 [requests, C]
    newest,  # int64 [requests, K]
    paths,  # float32 [requests, K]
    node_tokens,  # int64 [requests, NODES]
    node_parents,
    node_scores,  # float32
    tokens,  # int64 [requests, COUNT]
    parents,
    scores,  # float32
    FIRST: tl.constexpr,
    NODES: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOT: tl.constexpr,
):
    """Program (request, block of nodes): the rank of each node and of its parent among all, by comparison."""
    request = tl.program_id(0).to(tl.int64)
    each: tl.constexpr = C // K if C > K else 1
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = node < FIRST + C
    earlier, level = inside & (node < FIRST), inside & (node >= FIRST)
    candidate = tl.maximum(node - FIRST, 0)
    known = tl.load(node_scores + request * NODES + node, mask=earlier, other=float("-inf"))
    score = tl.where(earlier, known, _scores(logprobs, paths, request, candidate, level, C, each, ROOT))
    if ROOT:
        parent = tl.full([BLOCK], -1, tl.int64)
    else:
        parent = tl.load(newest + request * (C // each) + candidate // each, mask=level, other=-1)
        parent = tl.where(earlier, tl.load(node_parents + request * NODES + node, mask=earlier, other=-1), parent)
    # A parent is never in the last level.
    above = tl.load(node_scores + request * NODES + parent, mask=inside & (parent >= 0), other=float("inf"))
    rank, parent_rank = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for one in range(FIRST + C):
        if one < FIRST:
            other = tl.load(node_scores + request * NODES + one)
        else:
            other = tl.load(logprobs + request * C + (one - FIRST))
            if not ROOT:
                other += tl.load(paths + request * (C // each) + (one - FIRST) // each)
        rank += ((other > score) | ((other == score) & (one < node))).to(tl.int32)
        parent_rank += ((other > above) | ((other == above) & (one < parent))).to(tl.int32)
    taken = inside & (rank < COUNT)
    token = tl.where(
        earlier,
        tl.load(node_tokens + request * NODES + node, mask=earlier, other=0),
        tl.load(drawn + request * C + candidate, mask=level, other=0),
    )
    to = request * COUNT + rank
    tl.store(tokens + to, token, mask=taken)
    tl.store(scores + to, score, mask=taken)
    tl.store(parents + to, tl.where(parent < 0, -1, parent_rank.to(tl.int64)), mask=taken)
