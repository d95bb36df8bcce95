# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Gumbel-max draws with the noise of `models.noise`, the k best of them, and the cutoff of top-k and top-p.

The vocabulary is split into chunks at fixed places. One program reduces each chunk, another a row's chunks. Noise and
scores follow the native CPU kernel's formulas (native/vec.h, native/philox.h), operation by operation. There is no
sorting and no repeated draw, and a row never reads another.
"""

import triton
import triton.language as tl

_LEAST = tl.constexpr(-1e30)  # reference point of a chunk without a kept token: finite, to avoid NaN
_NO_TOKEN = tl.constexpr(2147483647)
_ALMOST = tl.constexpr(1.0 - 5e-7)  # a set this close to p reaches it, because sums of probabilities are rounded


@triton.jit
def _philox(counter, block, low_key, high_key):
    """Four words for each block of four tokens: Philox4x32-10 of counter (position, block, 0, 0)."""
    c0, c1, c2, c3 = counter, block, tl.zeros_like(block), tl.zeros_like(block)
    first: tl.constexpr = 0xD2511F53
    second: tl.constexpr = 0xCD9E8D57
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, first), c0 * first
        high1, low1 = tl.umulhi(c2, second), c2 * second
        c0, c1, c2, c3 = high1 ^ c1 ^ low_key, low1, high0 ^ c3 ^ high_key, low0
        low_key += 0x9E3779B9
        high_key += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _log_reduced(f, e):
    """log(1 + f) + e log(2) for f in [sqrt(1/2) - 1, sqrt(2) - 1], within 2 ulp; coefficients of native/vec.h."""
    p = tl.fma(f, 0.06971611827611923, -0.11479733884334564)
    p = tl.fma(p, f, 0.11685419827699661)
    p = tl.fma(p, f, -0.12425687164068222)
    p = tl.fma(p, f, 0.14249058067798615)
    p = tl.fma(p, f, -0.1666780263185501)
    p = tl.fma(p, f, 0.20000715553760529)
    p = tl.fma(p, f, -0.2499999701976776)
    p = tl.fma(p, f, 0.3333333134651184)
    square = f * f
    tail = tl.fma(square * f, p, e * 1.428606765330187e-06)
    tail = tl.fma(square, -0.5, tail)
    return tl.fma(e, 0.693145751953125, tail + f)


@triton.jit
def _mantissa(x):
    """(m, e) with x = m 2^e and m in [sqrt(1/2), sqrt(2)); x positive, normal, finite."""
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23
    return (bits - (e << 23)).to(tl.float32, bitcast=True), e


@triton.jit
def _gumbel(words):
    """-log(-log(1 - v)) with v = (word + 1/2) / 2^32, rounded to float32 and kept below 1."""
    v = tl.minimum(words.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.9999999403953552)
    u = 1.0 - v
    lost = (1.0 - u) - v
    m, e = _mantissa(u)
    scale = ((127 - e) << 23).to(tl.float32, bitcast=True)
    inner = -_log_reduced(tl.fma(lost, scale, m - 1.0), e.to(tl.float32))
    m, e = _mantissa(inner)
    return -_log_reduced(m - 1.0, e.to(tl.float32))


@triton.jit
def _noise(key, position, start, BLOCKS: tl.constexpr):
    """Gumbel noise of tokens [start, start + 4 BLOCKS)."""
    block = (start // 4 + tl.arange(0, BLOCKS)).to(tl.uint32)
    nothing = tl.zeros([BLOCKS], tl.uint32)
    low, high = nothing + key.to(tl.uint32), nothing + (key >> 32).to(tl.uint32)
    w0, w1, w2, w3 = _philox(nothing + position.to(tl.uint32), block, low, high)
    return _gumbel(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCKS * 4]))


@triton.jit
def _scaled(logits, cutoff, temperature, row, token, V: tl.constexpr, STRIDE: tl.constexpr):
    """(logits, whether they are kept, logits / T or -inf, whether T is 0) of the row's tokens; at T = 0 the logits."""
    logit = tl.load(logits + row.to(tl.int64) * STRIDE + token, mask=token < V, other=float("-inf")).to(tl.float32)
    kept = (token < V) & (logit >= tl.load(cutoff + row))
    t = tl.load(temperature + row)
    divisor = tl.zeros_like(logit) + tl.where(t == 0.0, 1.0, t)
    return logit, kept, tl.where(kept, tl.div_rn(logit, divisor), float("-inf")), t == 0.0


@triton.jit
def _mass(values):
    """(largest, but finite; sum of exp(values - largest))"""
    top = tl.maximum(tl.max(values, 0), _LEAST)
    return top, tl.sum(tl.exp(values - top), 0)


@triton.jit
def sample_chunks(
    logits,  # [rows, V], rows STRIDE apart
    cutoff,  # float32 [rows]
    temperature,  # float32 [rows]
    keys,  # int64 [rows]
    positions,  # int64 [rows]
    scores,  # float32 [5, rows, chunks]: best score; top and mass of scaled logits, of logits
    tokens,  # index of the best score
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (chunk of 4 BLOCKS tokens, row)."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    start = chunk * (BLOCKS * 4)
    token = start + tl.arange(0, BLOCKS * 4)
    logit, kept, scaled, greedy = _scaled(logits, cutoff, temperature, row, token, V, STRIDE)
    score = scaled
    if not greedy:
        noise = _noise(tl.load(keys + row), tl.load(positions + row), start, BLOCKS)
        score = tl.where(kept, scaled + noise, float("-inf"))
    best = tl.max(score, 0)
    top, mass = _mass(scaled)
    top_t1, mass_t1 = _mass(logit)
    chunks = tl.num_programs(0)
    at = row * chunks + chunk
    part = tl.num_programs(1) * chunks
    # A token that is not kept scores -inf. It wins only if none is kept: in a row of NaN, the chunk's first.
    tl.store(tokens + at, tl.min(tl.where((score == best) & (token < V), token, _NO_TOKEN), 0))
    tl.store(scores + at, best)
    tl.store(scores + part + at, top)
    tl.store(scores + 2 * part + at, mass)
    tl.store(scores + 3 * part + at, top_t1)
    tl.store(scores + 4 * part + at, mass_t1)


@triton.jit
def _log_mass(tops, masses):
    """log-sum-exp of chunks, as (reference point, log of the mass relative to it)."""
    top = tl.max(tops, 0)
    return top, tl.log(tl.sum(masses * tl.exp(tops - top), 0))


@triton.jit
def sample_rows(
    logits,
    temperature,
    scores,
    chunk_tokens,
    tokens,  # int64 [rows]
    logprobs,  # float32 [rows]
    logprobs_t1,
    STRIDE: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program (row): the best of its chunks, the smallest token among equals."""
    row = tl.program_id(0)
    chunk = tl.arange(0, WIDTH)
    inside = chunk < CHUNKS
    at = row * CHUNKS + chunk
    part = tl.num_programs(0) * CHUNKS
    score = tl.load(scores + at, mask=inside, other=float("-inf"))
    of_chunk = tl.load(chunk_tokens + at, mask=inside, other=_NO_TOKEN)
    token = tl.min(tl.where(score == tl.max(score, 0), of_chunk, _NO_TOKEN), 0)
    top, mass = _log_mass(
        tl.load(scores + part + at, mask=inside, other=_LEAST), tl.load(scores + 2 * part + at, mask=inside, other=0.0)
    )
    top_t1, mass_t1 = _log_mass(
        tl.load(scores + 3 * part + at, mask=inside, other=_LEAST),
        tl.load(scores + 4 * part + at, mask=inside, other=0.0),
    )
    t = tl.load(temperature + row)
    chosen = tl.load(logits + row.to(tl.int64) * STRIDE + token).to(tl.float32)
    scaled = tl.div_rn(chosen, tl.where(t == 0.0, 1.0, t))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.where(t == 0.0, 0.0, scaled - top - mass))
    tl.store(logprobs_t1 + row, chosen - top_t1 - mass_t1)


@triton.jit
def _next_best(values, tokens, taken):
    """(largest value not taken, its token, the smallest among equals); _NO_TOKEN when all are."""
    free = tl.where(taken, float("-inf"), values)
    best = tl.max(free, 0)
    return best, tl.min(tl.where((free == best) & (taken == 0), tokens, _NO_TOKEN), 0)


@triton.jit(do_not_specialize=["scale"])
def topk_chunks(
    logits,
    cutoff,
    temperature,
    keys,
    positions,
    masses,  # float32 [2, rows, chunks]: top and mass of values / scale
    values,  # float32 [rows, chunks, K]
    tokens,  # int32 [rows, chunks, K]
    scale,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    NOISE: tl.constexpr,
):
    """Program (chunk, row): the K best of its tokens, best first."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    start = chunk * (BLOCKS * 4)
    token = start + tl.arange(0, BLOCKS * 4)
    _, kept, value, greedy = _scaled(logits, cutoff, temperature, row, token, V, STRIDE)
    if NOISE:  # noqa: SIM102 - a separate constant test: otherwise the branch is compiled
        if not greedy:
            noise = _noise(tl.load(keys + row), tl.load(positions + row), start, BLOCKS)
            value = tl.where(kept, value + noise, float("-inf"))
    top, mass = _mass(tl.div_rn(value, tl.zeros_like(value) + scale))
    at = row * tl.num_programs(0) + chunk
    tl.store(masses + at, top)
    tl.store(masses + tl.num_programs(1) * tl.num_programs(0) + at, mass)
    taken = token >= V
    for place in range(K):
        best, best_token = _next_best(value, token, taken)
        tl.store(values + at * K + place, best)
        tl.store(tokens + at * K + place, best_token)
        taken = taken | (token == best_token)


@triton.jit(do_not_specialize=["scale"])
def topk_rows(
    masses,
    values,
    chunk_tokens,
    tokens,  # int64 [rows, K]
    logprobs,  # float32 [rows, K]
    scale,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Program (row): the K best of its chunks' best."""
    row = tl.program_id(0)
    chunk = tl.arange(0, WIDTH)
    at = row * CHUNKS + chunk
    top, mass = _log_mass(
        tl.load(masses + at, mask=chunk < CHUNKS, other=_LEAST),
        tl.load(masses + tl.num_programs(0) * CHUNKS + at, mask=chunk < CHUNKS, other=0.0),
    )
    candidate = tl.arange(0, CANDIDATES)
    inside = candidate < CHUNKS * K
    value = tl.load(values + row * (CHUNKS * K) + candidate, mask=inside, other=float("-inf"))
    token = tl.load(chunk_tokens + row * (CHUNKS * K) + candidate, mask=inside, other=_NO_TOKEN)
    taken = token == _NO_TOKEN
    for place in range(K):
        best, best_token = _next_best(value, token, taken)
        tl.store(tokens + row * K + place, best_token.to(tl.int64))
        tl.store(logprobs + row * K + place, tl.div_rn(best, scale) - top - mass)
        taken = taken | (token == best_token)


@triton.jit
def _ordered(x):
    """uint32 with the same order as the floats; both zeros are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _float_of(ordered):
    bits = ordered.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits & 0x7FFFFFFF, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _largest_reaching(row_logits, divisor, top, needed, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """The largest ordered key t such that the tokens with keys >= t count (COUNT), or weigh, at least `needed`.

    Two bits at a time from the highest, so sixteen passes; a weight is exp((logit - top) / T). Rounded sums are
    monotone in the set: each element is always added at the same place of the same tree.
    """
    found = tl.full([], 0, tl.uint32)
    column = tl.arange(0, BLOCK)
    digit = tl.full([], 1 << 30, tl.uint32)
    for _ in range(16):
        one, two, three = found + digit, found + digit * 2, found + digit * 3
        sum1 = tl.zeros([BLOCK], tl.float32)
        sum2 = tl.zeros([BLOCK], tl.float32)
        sum3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            logit = tl.load(row_logits + start + column, mask=start + column < V, other=float("-inf")).to(tl.float32)
            key = tl.where(start + column < V, _ordered(logit), 0)
            weight = tl.full([BLOCK], 1.0, tl.float32)
            if not COUNT:
                weight = tl.exp((logit - top) / divisor)
            sum1 += tl.where(key >= one, weight, 0.0)
            sum2 += tl.where(key >= two, weight, 0.0)
            sum3 += tl.where(key >= three, weight, 0.0)
        found = tl.where(tl.sum(sum1, 0) >= needed, one, found)
        found = tl.where(tl.sum(sum2, 0) >= needed, two, found)
        found = tl.where(tl.sum(sum3, 0) >= needed, three, found)
        digit = digit >> 2
    return found


@triton.jit
def cutoff(
    logits,  # [rows, V], rows STRIDE apart
    temperature,  # float32 [rows]
    top_k,  # int64 [rows], 0: off
    top_p,  # float32 [rows], 1: off
    least,  # float32 [rows]
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row): the smallest logit that may be drawn. Counts below 2^24 and their sums are exact in float32."""
    row = tl.program_id(0)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    if ((k <= 0) | (k >= V)) & (p >= 1.0):  # of a graph for whoever is cut: most rows may not be
        tl.store(least + row, float("-inf"))
        return
    row_logits = logits + row.to(tl.int64) * STRIDE
    column = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, V, BLOCK):
        inside = start + column < V
        logit = tl.load(row_logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, logit)
        lowest = tl.minimum(lowest, tl.where(inside, logit, float("inf")))
    top, bound = tl.max(highest, 0), tl.min(lowest, 0)
    t = tl.load(temperature + row)
    divisor = tl.where(t == 0.0, 1.0, t)
    if (k > 0) & (k < V):
        bound = _float_of(_largest_reaching(row_logits, divisor, top, k.to(tl.float32), V, BLOCK, True))
    if p < 1.0:
        above = tl.zeros([BLOCK], tl.float32)
        count = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            logit = tl.load(row_logits + start + column, mask=start + column < V, other=float("-inf")).to(tl.float32)
            above += tl.where(logit > bound, tl.exp((logit - top) / divisor), 0.0)
            count += tl.where(logit > bound, 1.0, 0.0)
        # Top-k may leave room for only some of the tokens tied at the bound: only those have mass. Without top-k all
        # do.
        limit = tl.where((k > 0) & (k < V), k, V).to(tl.float32)
        mass = tl.sum(above, 0) + (limit - tl.sum(count, 0)) * tl.exp((bound - top) / divisor)
        nucleus = _float_of(_largest_reaching(row_logits, divisor, top, p * mass * _ALMOST, V, BLOCK, False))
        bound = tl.minimum(tl.maximum(bound, nucleus), top)
    tl.store(least + row, bound)
