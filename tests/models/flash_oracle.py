"""torch's FlashAttention for packed segments, computed plainly on the CPU: `aten::_flash_attention_forward` and its
backward, which have no CPU kernel. With it `torch.nn.attention.varlen.varlen_attn` of the installed torch runs here."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of q [T, Hq, D], k and v [T, Hkv, D] in 16 bits: output, and log-sum-exp float32 [Hq, T]."""
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, is_causal, window_size_left, window_size_right)
    assert not dropout_p and not any(value is not None for value in others.values())  # noqa: PT018
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], query.shape[0])
    for rows in _segments(cum_seq_q):
        scores, _, v = _scores(query[rows], key[rows], value[rows], scale)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", (scores - lse[:, rows, None]).exp(), v).to(out.dtype)
    nothing = torch.empty(0)
    return out, lse, torch.zeros(2, dtype=torch.uint64), nothing, nothing.clone()


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the kernel: probabilities are made again from `logsumexp`, and `out` gives the softmax's correction."""
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, is_causal, window_size_left, window_size_right)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    for rows in _segments(cum_seq_q):
        scores, k, v = _scores(query[rows], key[rows], value[rows], scale)
        probs = (scores - logsumexp[:, rows, None]).exp()
        grad, q = grad_out[rows].float(), query[rows].float()
        correction = (grad * out[rows].float()).sum(-1).t()[:, :, None]
        slopes = probs * (torch.einsum("qhd,khd->hqk", grad, v) - correction) * factor
        grads[0][rows] = torch.einsum("hqk,khd->qhd", slopes, k).to(query.dtype)
        for of, wide in (
            (1, torch.einsum("hqk,qhd->khd", slopes, q)),
            (2, torch.einsum("hqk,qhd->khd", probs, grad)),
        ):
            grads[of][rows] = wide.unflatten(1, (-1, group)).sum(2).to(key.dtype)
    return grads[0], grads[1], grads[2]


@contextmanager
def installed() -> Iterator[None]:
    """CPU kernels of the two operators inside the block."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _segments(offsets: Tensor) -> list[slice]:
    ends = offsets.tolist()
    return [slice(a, b) for a, b in pairwise(ends) if b > a]


def _scores(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Causal scores [Hq, n, n], and keys and values for every query head, in float32."""
    group, count = q.shape[1] // k.shape[1], len(q)
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf), k, v


def _check(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: int, causal: bool, *window: int | None
) -> None:
    """What the kernel demands of its arguments, and what this oracle is for."""
    if q.dtype not in (torch.bfloat16, torch.float16) or {k.dtype, v.dtype} != {q.dtype}:
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16, got {q.dtype}, {k.dtype}, {v.dtype}")
    assert q.dim() == k.dim() == v.dim() == 3
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert cu_q.dtype is cu_k.dtype is torch.int32
    assert cu_q.is_contiguous()
    assert q.shape[1] % k.shape[1] == 0
    assert q.shape[2] % 8 == 0 and q.shape[2] <= 256  # noqa: PT018
    assert int(cu_q.diff().max()) <= longest
    assert causal
    assert window == (-1, 0)
