"""Attention over packed segments on CUDA: torch's variable-length kernel, or padded groups of similar lengths.

Chooses between the two once per kind of tensor, by testing torch's kernel on a few rows. Handles the differences
between torch's versions. CPUs have native kernels instead.
"""

import inspect
import logging
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from models.ops import reference
from models.ops.segments import PaddedGroups, Segments

_LOG = logging.getLogger(__name__)
_TRIED = (3, 0, 1, 70)  # test lengths: an empty segment, a single row, more than a tile
_TOLERANCE = 0.05  # of values near 1 with 8 bits of precision
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, segments: Segments, scale: float) -> Tensor:
    """Same as models.ops.packed_attention, differentiable, without a host synchronisation (except in the first call per
    kind of tensor)."""
    if q.shape[0] == 0:
        return torch.empty_like(q)
    attend = variable_length(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2])
    if attend is not None and k.dtype is q.dtype and v.dtype is q.dtype:
        return attend(q, k, v, cu_seqlens, segments.longest, scale)
    return grouped_attention(q, k, v, segments.groups_on(q.device), scale)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, groups: PaddedGroups, scale: float) -> Tensor:
    """Compute each group of similar lengths in one call of torch's scaled dot-product attention."""
    if q.dtype is torch.float32 and q.shape[1] != k.shape[1]:
        # With fewer key heads, torch's only float32 kernel keeps all scores.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    padded = [x.index_select(0, groups.rows) for x in (q, k, v)]
    sizes = [count * width for count, width in groups.shapes]
    outs = []
    for (count, width), *parts in zip(groups.shapes, *(torch.split(x, sizes) for x in padded), strict=True):
        # Padding comes after each segment's rows, so the causal mask alone keeps it out of every real row.
        one, two, three = (x.unflatten(0, (count, width)).transpose(1, 2) for x in parts)
        out = F.scaled_dot_product_attention(
            one, two, three, is_causal=True, scale=scale, enable_gqa=one.shape[1] != two.shape[1]
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, groups.places)


@cache
def variable_length(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> Attend | None:
    """Return torch's variable-length attention as (q, k, v, cu_seqlens, longest, scale); None if it is unusable.

    It must match the oracle, forward and backward, for this kind of tensor on this device; otherwise the log has the
    reason."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None  # no kernel for float32
    try:
        attend = _of_torch(_varlen_attn())
        worst = _error(attend, device, dtype, heads, kv_heads, dim)
        why = "" if worst <= _TOLERANCE else f"it is wrong by {worst:.3g}"
    except (ImportError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not why:
        return attend
    _LOG.warning(
        "torch %s: variable-length attention of %s, %d query and %d key heads of %d on %s cannot be used (%s); "
        "segments are padded in groups instead, which is slower",
        torch.__version__,
        dtype,
        heads,
        kv_heads,
        dim,
        device,
        why,
    )
    return None


def _varlen_attn() -> Callable[..., Tensor]:
    """Return torch's function. Raises ImportError if torch has none."""
    from torch.nn.attention.varlen import varlen_attn  # late import: it registers operators

    return varlen_attn  # type: ignore[return-value]  # without `return_aux` it returns one tensor


def _of_torch(function: Callable[..., Tensor]) -> Attend:
    """Adapt to torch's version: 2.11 accepts grouped heads without a flag, 2.12 and later require it."""
    tells = "enable_gqa" in inspect.signature(function).parameters

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float) -> Tensor:
        told = {"enable_gqa": True} if tells and q.shape[1] != k.shape[1] else {}
        # window_size: all earlier rows, no later ones
        return function(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=(-1, 0), **told)

    return attend


def _error(attend: Attend, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> float:
    """Return the largest difference of outputs and gradients from the oracle, which computes the same rounded inputs in
    float32 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    rows, longest = sum(_TRIED), max(_TRIED)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, dim), (heads, dim))
    results = []
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        inputs = [torch.randn(rows, *shape, generator=generator).to(dtype) for shape in shapes]
        offsets = torch.tensor([0, *_TRIED]).cumsum(0).to(torch.int32)
        for theirs in (True, False):
            place, kind = (device, dtype) if theirs else (torch.device("cpu"), torch.float32)
            *leaves, grad = (x.to(place, kind) for x in inputs)
            for leaf in leaves:
                leaf.requires_grad_()
            if theirs:
                out = attend(leaves[0], leaves[1], leaves[2], offsets.to(place), longest, dim**-0.5)
            else:
                q, k, v = leaves
                out = reference.packed_attention(q, k, v, offsets, dim**-0.5, max_seqlen=longest)
            found = (out, *torch.autograd.grad(out, leaves, grad))
            results.append([x.detach().to("cpu", torch.float32) for x in found])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))
