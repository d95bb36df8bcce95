# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""One token at a time: RMS norm with or without the residual's sum, RoPE with head norms and cache write, SwiGLU.

Each computes in float32 and rounds where `models.ops.reference` does. A program reads one token only.
"""

import triton
import triton.language as tl

from models.ops.triton.overlap import after_previous


@triton.jit
def normed_row(x, residual, weight, summed, row, column, inside, eps, SIZE: tl.constexpr, ADD: tl.constexpr):
    """The norm of the values behind x + row, or with ADD of their rounded sums with the residual, which are stored."""
    value = tl.load(x + row + column, mask=inside, other=0.0)
    if ADD:
        added = tl.load(residual + row + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(summed + row + column, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return (wide * scale * gain).to(value.dtype)


@triton.jit
def gated_row(gate_up, row, column, inside, SIZE: tl.constexpr):
    """silu(first half) * second half of a row of [rows, 2 SIZE], rounded."""
    gate = tl.load(gate_up + row * (2 * SIZE) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty)


@triton.jit
def rms_norm(
    x,  # [rows, SIZE]
    residual,  # [rows, SIZE], with ADD
    weight,  # [SIZE]
    normed,
    summed,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row): the norm of x, or with ADD of x + residual, which is rounded first and stored in `summed`."""
    if PDL:
        after_previous()
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, WIDTH)
    inside = column < SIZE
    value = normed_row(x, residual, weight, summed, row, column, inside, eps, SIZE, ADD)
    tl.store(normed + row + column, value, mask=inside)


@triton.jit
def _normed(first, second, weight, half, inside, eps, D: tl.constexpr):
    """Both halves of heads [N, D], times rsqrt of the head's mean square, times the weight; rounded."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
    gain_a = tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    gain_b = tl.load(weight + D // 2 + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    return (a * scale * gain_a).to(first.dtype), (b * scale * gain_b).to(first.dtype)


@triton.jit
def rope_write(
    qkv,  # [rows, HQ + 2 * HKV, D], rows STRIDE apart
    cos,  # float32 [positions, D / 2]
    sin,
    positions,  # int64 [rows]
    kv_slots,  # int64 [rows]
    q_norm,  # [D], with NORM
    k_norm,
    q,  # [rows, HQ, D]
    k_cache,  # [slots, HKV, D]
    v_cache,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, group of HEADS heads of the fused projection)."""
    if PDL:
        after_previous()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    HALF: tl.constexpr = D // 2
    half = tl.arange(0, WIDTH)
    inside = half < HALF
    of_head = (head < HQ + 2 * HKV)[:, None] & inside[None, :]
    source = qkv + token * STRIDE + head[:, None] * D + half[None, :]
    first, second = tl.load(source, mask=of_head, other=0.0), tl.load(source + HALF, mask=of_head, other=0.0)
    is_q, is_k = (head < HQ)[:, None], ((head >= HQ) & (head < HQ + HKV))[:, None]
    if NORM:
        q_first, q_second = _normed(first, second, q_norm, half, inside, eps, D)
        k_first, k_second = _normed(first, second, k_norm, half, inside, eps, D)
        first = tl.where(is_q, q_first, tl.where(is_k, k_first, first))
        second = tl.where(is_q, q_second, tl.where(is_k, k_second, second))
    angle = tl.load(positions + token) * HALF + half
    c = tl.load(cos + angle, mask=inside, other=1.0)[None, :]
    s = tl.load(sin + angle, mask=inside, other=0.0)[None, :]
    a, b = first.to(tl.float32), second.to(tl.float32)
    first = tl.where(is_q | is_k, (a * c - b * s).to(first.dtype), first)
    second = tl.where(is_q | is_k, (b * c + a * s).to(second.dtype), second)
    to_q = q + (token * HQ + head)[:, None] * D + half[None, :]
    tl.store(to_q, first, mask=of_head & is_q)
    tl.store(to_q + HALF, second, mask=of_head & is_q)
    slot = tl.load(kv_slots + token) * HKV
    to_k = k_cache + (slot + head - HQ)[:, None] * D + half[None, :]
    tl.store(to_k, first, mask=of_head & is_k)
    tl.store(to_k + HALF, second, mask=of_head & is_k)
    is_v = (head >= HQ + HKV)[:, None]
    to_v = v_cache + (slot + head - HQ - HKV)[:, None] * D + half[None, :]
    tl.store(to_v, first, mask=of_head & is_v)
    tl.store(to_v + HALF, second, mask=of_head & is_v)


@triton.jit
def swiglu(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row, block of columns): silu(first half) * second half of [rows, 2 SIZE]."""
    if PDL:
        after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    tl.store(out + row * SIZE + column, gated_row(gate_up, row, column, inside, SIZE), mask=inside)
