"""Causal attention over packed segments (learner) and over a paged KV cache (engine); bitwise equal to each other.

On CPU both run one native kernel. A query row's result depends on that row's keys, values and their order only. On
CUDA, paged attention is a Triton kernel with the same property (`models.ops.triton`), and packed attention is torch's
variable-length one (`varlen`). Elsewhere both are torch's scaled dot-product attention (`reference`), equal up to
rounding.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.ops import reference, varlen
from models.ops.native import as_int32, dense_rows, kernels, takes
from models.ops.segments import Segments
from models.ops.triton import operators
from models.ops.triton.operators import operators_take

_BF16 = torch.bfloat16
_LANES = 8


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, *, segments: Segments | None = None
) -> Tensor:
    """Causal attention inside each segment; differentiable.

    q [T, Hq, D], k and v [T, Hkv, D] with Hq a multiple of Hkv; cu_seqlens int32 [S + 1], from 0 to T, non-decreasing.
    Returns [T, Hq, D].

    `segments`: the same lengths on the host. Without them, every call on CUDA synchronises to read them, and pads all
    segments to the longest. With `segments.parents`, rows also attend to the segments that theirs continues; on the CPU
    the result is bitwise that of whole sequences. Raises ValueError on inconsistent offsets or parents.
    """
    native = takes(q, k, v) and not q.shape[2] % _LANES
    if segments is not None and segments.parents is not None and not native:
        alone = segments.unrolled_on(q.device)
        q, k, v = (x.index_select(0, alone.rows) for x in (q, k, v))
        out = packed_attention(q, k, v, alone.cu_seqlens, scale, segments=alone.segments)
        return out.index_select(0, alone.places)
    if q.is_cuda and segments is not None:
        return varlen.packed_attention(q, k, v, cu_seqlens, segments, scale)
    if not native:
        longest = None if segments is None else segments.longest
        return reference.packed_attention(q, k, v, cu_seqlens, scale, max_seqlen=longest)
    _check_heads(q, k, v)
    parents = None if segments is None else segments.parents
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        result: Tensor = _PackedAttention.apply(q, k, v, cu_seqlens, parents, scale)  # type: ignore[no-untyped-call]
        return result
    return _packed_attention(dense_rows(q), dense_rows(k), dense_rows(v), as_int32(cu_seqlens), parents, scale)


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
    """Attention of each request's last rows over its cached context, causal; any number of rows per request.

    q [T, Hq, D]; caches [slots, Hkv, D]; int32 block_tables [B, M], query_offsets [B + 1], context_lens [B]. The
    queries of request b are rows query_offsets[b]:query_offsets[b + 1], the last tokens of its context. Their keys and
    values are in the cache already. Position p is in slot block_tables[b, p // block_tokens] * block_tokens + p %
    block_tokens. Returns [T, Hq, D].

    tree_mask, bool or uint8 [T, W]: column j of row t says whether the row sees its request's query row j (itself
    included). Rows then hold a tree of drafted tokens, and W is at least the largest number of rows of a request. A row
    whose ancestors form a plain continuation gets bitwise the plain result; on CUDA if they are the request's first
    rows, without gaps.

    The maximum lengths are upper bounds that avoid host synchronisations on CUDA. There, rows behind query_offsets[B]
    are padding (their result is zero) and a request may have no rows. Raises ValueError on inconsistent lengths and
    IndexError on blocks outside the cache (CPU).
    """
    if operators_take(q, k_cache, v_cache):
        attended: Tensor = operators.paged_attention(
            dense_rows(q),
            k_cache,
            v_cache,
            as_int32(block_tables),
            as_int32(query_offsets),
            as_int32(context_lens),
            None if tree_mask is None else tree_mask.to(torch.uint8),
            block_tokens,
            int(query_offsets.diff().max()) if max_query is None else max_query,
            int(context_lens.max()) if max_context is None else max_context,
            scale,
        )
        return attended
    native = takes(q, k_cache, v_cache) and k_cache.is_contiguous() and v_cache.is_contiguous()
    if not native or q.shape[2] % _LANES:
        return reference.paged_attention(
            q,
            k_cache,
            v_cache,
            block_tables,
            query_offsets,
            context_lens,
            block_tokens,
            scale,
            tree_mask=tree_mask,
            max_query=max_query,
            max_context=max_context,
        )
    _check_heads(q, k_cache, v_cache)
    requests = context_lens.shape[0]
    if query_offsets.shape != (requests + 1,) or block_tables.shape[0] != requests:
        raise ValueError("context_lens [B], query_offsets [B + 1] and block_tables [B, M] disagree about B")
    q, block_tables = dense_rows(q), as_int32(block_tables)
    query_offsets, context_lens = as_int32(query_offsets), as_int32(context_lens)
    mask_address = mask_width = 0
    if tree_mask is not None:
        if tree_mask.shape[0] != q.shape[0]:
            raise ValueError(f"tree_mask has {tree_mask.shape[0]} rows for {q.shape[0]} query rows")
        tree_mask = tree_mask.to(torch.uint8).contiguous()
        mask_address, mask_width = tree_mask.data_ptr(), tree_mask.shape[1]
    rows, query_heads, head_dim = q.shape
    out = q.new_empty((rows, query_heads, head_dim))
    kernels.paged_attention(  # type: ignore[union-attr]
        q.dtype is _BF16,
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_tables.data_ptr(),
        block_tables.shape[1],
        query_offsets.data_ptr(),
        context_lens.data_ptr(),
        requests,
        block_tokens,
        k_cache.shape[0],
        mask_address,
        mask_width,
        out.data_ptr(),
        rows,
        query_heads,
        k_cache.shape[1],
        head_dim,
        q.stride(0),
        scale,
        torch.get_num_threads(),
    )
    return out


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")


def _packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, parents: NDArray[np.int32] | None, scale: float
) -> Tensor:
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"{q.shape[0]} query rows, but {k.shape[0]} keys")
    if parents is not None and len(parents) + 1 != cu_seqlens.shape[0]:
        raise ValueError(f"{len(parents)} parents for {cu_seqlens.shape[0] - 1} segments")
    rows, query_heads, head_dim = q.shape
    out = q.new_empty((rows, query_heads, head_dim))
    kernels.packed_attention(  # type: ignore[union-attr]
        q.dtype is _BF16,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        cu_seqlens.data_ptr(),
        0 if parents is None else parents.ctypes.data,
        cu_seqlens.shape[0] - 1,
        out.data_ptr(),
        rows,
        query_heads,
        k.shape[1],
        head_dim,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        scale,
        torch.get_num_threads(),
    )
    return out


class _PackedAttention(torch.autograd.Function):
    """Saves no scores: the backward recomputes them, so memory stays linear in T."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        parents: NDArray[np.int32] | None,
        scale: float,
    ) -> Tensor:
        q, k, v, cu_seqlens = dense_rows(q), dense_rows(k), dense_rows(v), as_int32(cu_seqlens)
        ctx.save_for_backward(q, k, v, cu_seqlens)
        ctx.parents, ctx.scale = parents, scale
        return _packed_attention(q, k, v, cu_seqlens, parents, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, cu_seqlens = ctx.saved_tensors
        grad = grad.contiguous()
        rows, query_heads, head_dim = q.shape
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        kernels.packed_attention_backward(  # type: ignore[union-attr]
            q.dtype is _BF16,
            grad.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            cu_seqlens.data_ptr(),
            0 if ctx.parents is None else ctx.parents.ctypes.data,
            cu_seqlens.shape[0] - 1,
            grad_q.data_ptr(),
            grad_k.data_ptr(),
            grad_v.data_ptr(),
            rows,
            query_heads,
            k.shape[1],
            head_dim,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            ctx.scale,
            torch.get_num_threads(),
        )
        return grad_q, grad_k, grad_v, None, None, None
