"""Kernels that only a device has, on host tensors: products with another result type, packed attention of any lengths.
Refuses what theirs refuse. Plain and slow.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def _wide(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product of bfloat16 with sums that stay float32."""

    def run(*tensors: Any, **kwargs: Any) -> Tensor:
        *operands, dtype = tensors
        return product(*(x.to(dtype) for x in operands), **{k: v for k, v in kwargs.items() if k != "out"})

    return run


def _segments(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    queries, keys = cu_q.tolist(), cu_k.tolist()
    for i in range(len(queries) - 1):
        yield slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])


def _weights(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    """[H, Tq, Tk], float32; q [Tq, H, D]."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * (scale or q.shape[-1] ** -0.5)
    if causal:  # the last query sees the last key
        rows, columns = scores.shape[1:]
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def _check(q: Tensor, *cu: Tensor) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise RuntimeError("FlashAttention needs head dimensions of up to 256, in steps of 8")
    if any(each.dtype is not torch.int32 for each in cu):
        raise RuntimeError("cu_seqlens must have dtype int32")


def _grouped(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *rest: Any,
    **later: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp [H, T] and a random state that nobody uses."""
    cu_k = cu_q if cu_k is None else cu_k
    _check(q, cu_q, cu_k)
    causal = causal or (window_size is not None and list(window_size) == [-1, 0])
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
    keys, values = _grouped(k, q.shape[1]), _grouped(v, q.shape[1])
    for rows, columns in _segments(cu_q, cu_k):
        assert rows.stop - rows.start <= max_q, "max_q is below a segment's length"
        assert columns.stop - columns.start <= max_k, "max_k is below a segment's length"
        scores = _weights(q[rows], keys[columns], causal, scale)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values[columns].float()).to(q.dtype)
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def varlen_attn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *rest: Any,
    **later: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    cu_k = cu_q if cu_k is None else cu_k
    _check(q, cu_q, cu_k)
    causal = causal or (window_size is not None and list(window_size) == [-1, 0])
    heads, factor = q.shape[1], scale or q.shape[-1] ** -0.5
    keys, values = _grouped(k, heads), _grouped(v, heads)
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, keys, values))
    for rows, columns in _segments(cu_q, cu_k):
        p = _weights(q[rows], keys[columns], causal, scale).softmax(-1)
        g = grad[rows].float()
        dv[columns] = torch.einsum("hqk,qhd->khd", p, g)
        dp = torch.einsum("qhd,khd->hqk", g, values[columns].float())
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * factor
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, keys[columns].float())
        dk[columns] = torch.einsum("hqk,qhd->khd", ds, q[rows].float())
    dk, dv = (x.view(x.shape[0], k.shape[1], -1, x.shape[2]).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


TABLE: dict[str, Callable[..., Any]] = {
    "aten.mm.dtype": _wide(torch.mm),
    "aten.bmm.dtype": _wide(torch.bmm),
    "aten.addmm.dtype": _wide(torch.addmm),
    "aten.baddbmm.dtype": _wide(torch.baddbmm),
    "torch_attn._varlen_attn.default": varlen_attn,
    "torch_attn._varlen_attn_backward.default": varlen_attn_backward,
}
