"""Packed variable-length sequences: the learner's attention context. No cache, no padding, differentiable."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models import ops
from models.transfer import upload


class PackedContext:
    """Concatenated sequences. Each token attends to itself, to earlier tokens of its own segment, and to the segments
    that its own continues.

    Segments with parents (`from_lengths`) store a common prefix once. `cu_seqlens`: int32 [S+1], 0 = cu_seqlens[0] <=
    ... <= cu_seqlens[S] = T; positions restart at 0 in each segment. If lengths are known on the host, `from_lengths`
    avoids all host synchronisations on CUDA.
    """

    __slots__ = ("cu_seqlens", "positions", "segments")

    def __init__(self, cu_seqlens: Tensor) -> None:
        if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
            raise ValueError(
                f"cu_seqlens must be int32 [segments + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            )
        self.cu_seqlens = cu_seqlens
        self.segments: ops.Segments | None = None
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        offsets = torch.repeat_interleave(starts, lengths)  # [T]
        self.positions = torch.arange(offsets.numel(), device=cu_seqlens.device) - offsets

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu", parents: Sequence[int] | None = None
    ) -> "PackedContext":
        """Return the context of segments of these lengths, in tokens. `parents`: see `ops.Segments`."""
        there = upload(packed_arrays(lengths, parents), device)
        return cls.uploaded(lengths, there["cu_seqlens"], there["positions"], parents)

    @classmethod
    def uploaded(
        cls, lengths: Sequence[int], cu_seqlens: Tensor, positions: Tensor, parents: Sequence[int] | None = None
    ) -> "PackedContext":
        """Return the context of `packed_arrays` that the caller has copied to the device."""
        context = cls.__new__(cls)
        context.cu_seqlens, context.positions = cu_seqlens, positions
        context.segments = ops.Segments(lengths, parents)
        return context

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        return ops.packed_attention(q, k, v, self.cu_seqlens, q.shape[-1] ** -0.5, segments=self.segments)


def packed_arrays(lengths: Sequence[int], parents: Sequence[int] | None = None) -> dict[str, np.ndarray]:
    """Return `cu_seqlens` int32 [S + 1] and `positions` int64 [T] of segments of these lengths. A segment with a parent
    continues at the parent's end."""
    sizes = np.asarray(lengths, dtype=np.int64)
    ends = np.concatenate(([0], sizes.cumsum()))
    first = np.zeros(len(sizes), np.int64)
    for segment, parent in enumerate(() if parents is None else parents):
        if parent >= 0:
            first[segment] = first[parent] + sizes[parent]
    positions = np.arange(int(ends[-1])) - np.repeat(ends[:-1] - first, sizes)
    return {"cu_seqlens": ends.astype(np.int32), "positions": positions}
