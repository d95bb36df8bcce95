"""Every operation in plain torch: the oracle of the native kernels, and the fallback for CUDA and for CPUs without
them.

No host synchronisation when the optional maximum lengths are given. Computes in float32 and rounds once at the end,
whatever the storage dtype. Independent of the native extension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.noise import gumbel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.float()[:, None, :], sin.float()[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [B, Q, Hq, D], k and v [B, C, Hkv, D] -> [B, Q, Hq, D]; causal where `mask` [B, 1, Q, C] is None."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _row_to_segment(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(segment, index in the segment), both [rows] int64, of the rows split by `offsets` [S + 1]."""
    row = torch.arange(rows, device=offsets.device)
    segment = torch.bucketize(row, offsets[1:].long(), right=True).clamp_(max=max(offsets.numel() - 2, 0))
    return segment, row - offsets[segment]


def _padded_rows(offsets: Tensor, width: int, rows: int) -> Tensor:
    """[S, width] int64 row numbers; entries past a segment's end are some valid row."""
    index = offsets[:-1, None].long() + torch.arange(width, device=offsets.device)
    return index.clamp_(max=rows - 1)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, *, max_seqlen: int | None = None
) -> Tensor:
    rows = q.shape[0]
    if rows == 0:
        return torch.empty_like(q)
    width = int(cu_seqlens.diff().max()) if max_seqlen is None else max_seqlen
    index = _padded_rows(cu_seqlens, width, rows)
    # Padding comes after each segment's rows, so the causal mask alone keeps it out of every real row.
    padded = _attend(q[index], k[index], v[index], None, scale)
    return padded[_row_to_segment(cu_seqlens, rows)]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_offsets: Tensor,
    context_lens: Tensor,
    block_tokens: int,
    scale: float,
    *,
    tree_mask: Tensor | None = None,
    max_query: int | None = None,
    max_context: int | None = None,
) -> Tensor:
    rows = q.shape[0]
    if rows == 0:
        return torch.empty_like(q)
    device = q.device
    query_lens = query_offsets.diff()
    width = int(query_lens.max()) if max_query is None else max_query
    context = int(context_lens.max()) if max_context is None else max_context
    column = torch.arange(context, device=device)
    blocks = (column // block_tokens).clamp_(max=block_tables.shape[1] - 1)
    slots = block_tables.long()[:, blocks] * block_tokens + column % block_tokens
    # Table entries past a context's end are unspecified; their scores are masked, but the reads must stay inside.
    slots = torch.where(column < context_lens[:, None], slots, slots.new_zeros(()))
    index = _padded_rows(query_offsets, width, rows)
    start = (context_lens - query_lens)[:, None, None]  # position of each request's first query row
    place = torch.arange(width, device=device)[None, :, None]
    mask = column <= start + place
    if tree_mask is not None:
        among = column - start  # [B, 1, C]: which query row a column is, if any
        inside = (among >= 0) & (among < query_lens[:, None, None])
        allowed = tree_mask.bool()[index]  # [B, Q, tree width]
        among = among.clamp(0, tree_mask.shape[1] - 1).expand(-1, width, -1)
        mask = torch.where(inside, allowed.gather(2, among), mask)
    keys, values = k_cache[slots], v_cache[slots]
    # Cache slots that were never written may hold NaN, and 0 * NaN is NaN: masked values must be finite too.
    unused = (column >= context_lens[:, None])[:, :, None, None]
    padded = _attend(q[index], keys.masked_fill(unused, 0), values.masked_fill(unused, 0), mask[:, None], scale)
    return padded[_row_to_segment(query_offsets, rows)]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k_cache[slots] = k
    v_cache[slots] = v


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    kv_heads, head_dim = k_cache.shape[1:]
    parts = qkv.reshape(qkv.shape[0], -1, head_dim)
    q, k, v = parts[:, : -2 * kv_heads], parts[:, -2 * kv_heads : -kv_heads], parts[:, -kv_heads:]
    q = q if q_norm is None else rms_norm(q, q_norm, eps)
    k = k if k_norm is None else rms_norm(k, k_norm, eps)
    cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)
    write_kv(apply_rope(k, cos, sin), v, k_cache, v_cache, kv_slots)
    return apply_rope(q, cos, sin)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float32"""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def log_softmax(x: Tensor) -> Tensor:
    """In x's dtype, summed in float64."""
    shifted = x - x.detach().amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True, dtype=torch.float64).log().to(x.dtype)


def sample(
    logits: Tensor, cutoff: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float()
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    scaled = scaled.masked_fill(logits < cutoff[:, None], -torch.inf)
    noise = gumbel(keys, positions, logits.shape[1])
    tokens = torch.argmax(scaled + noise.masked_fill(greedy[:, None], 0.0), dim=-1)
    chosen = tokens[:, None]
    logprobs = log_softmax(scaled).gather(1, chosen)[:, 0].masked_fill(greedy, 0.0)
    logprobs_t1 = log_softmax(logits).gather(1, chosen)[:, 0]
    return tokens, logprobs, logprobs_t1


def sample_topk(
    logits: Tensor,
    cutoff: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    k: int,
    *,
    scale: float,
    noise: bool,
) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    greedy = temperature == 0
    values = (wide / torch.where(greedy, 1.0, temperature)[:, None]).masked_fill(wide < cutoff[:, None], -torch.inf)
    if noise:
        values = values + gumbel(keys, positions, wide.shape[1]).masked_fill(greedy[:, None], 0.0)
    tokens = values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return tokens, log_softmax(values / scale).gather(1, tokens)


def cutoff(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    vocab = logits.shape[1]
    ordered = logits.float().sort(dim=-1, descending=True).values
    rank = torch.arange(vocab, device=logits.device)
    keep = rank < torch.where(top_k > 0, top_k, vocab)[:, None]
    scaled = ordered / torch.where(temperature == 0, 1.0, temperature)[:, None]
    probability = scaled.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    # Kept while the probability before a token is below p; the most probable token is always kept. The sum is shifted
    # instead of subtracting the token's own probability: 0.5 + 0.3 is 0.8, but 0.9 - 0.1 is less.
    before = F.pad(probability.cumsum(dim=-1)[:, :-1], (1, 0))
    keep &= (before < top_p[:, None]) | (rank == 0) | (top_p[:, None] >= 1)
    last = keep.sum(dim=-1, keepdim=True) - 1
    return ordered.gather(1, last)[:, 0]
