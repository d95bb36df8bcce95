"""Packed variable-length sequences: the learner's attention context. No cache, no padding, differentiable."""

from collections.abc import Sequence

import torch
from torch import Tensor

from models import ops


class PackedContext:
    """Sequences laid end to end; each token attends to itself and the earlier tokens of its own segment.

    `cu_seqlens`: int32 [S+1], 0 = cu_seqlens[0] <= ... <= cu_seqlens[S] = T; positions restart at 0 in each segment.
    `max_seqlen` and `total_tokens` (T), where known, spare host synchronisations on CUDA.
    """

    __slots__ = ("cu_seqlens", "max_seqlen", "positions")

    def __init__(self, cu_seqlens: Tensor, *, max_seqlen: int | None = None, total_tokens: int | None = None) -> None:
        if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
            raise ValueError(
                f"cu_seqlens must be int32 [segments + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            )
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        offsets = torch.repeat_interleave(starts, lengths, output_size=total_tokens)  # [T]
        self.positions = torch.arange(offsets.numel(), device=cu_seqlens.device) - offsets

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "PackedContext":
        """Segments of these lengths, in tokens."""
        ends = torch.tensor([0, *lengths]).cumsum(0)
        cu_seqlens = ends.to(device=device, dtype=torch.int32)
        return cls(cu_seqlens, max_seqlen=max(lengths, default=0), total_tokens=sum(lengths))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        return ops.packed_attention(q, k, v, self.cu_seqlens, q.shape[-1] ** -0.5, max_seqlen=self.max_seqlen)
