"""Lengths of packed segments on the host, their parents, and padding plans with little waste. Computes no tensors.

Padding all segments to the longest costs several times the necessary work for long-tailed lengths. Groups of similar
lengths, each padded to its own longest, cost at most `MAX_PADDED_WORK` times as much.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from models.transfer import upload

MAX_PADDED_WORK = 1.3
LEAST_WIDTH = 64  # rows: a kernel's tile; shorter segments cost as much


@dataclass(frozen=True, slots=True)
class PaddedGroups:
    """P places: group after group, segment after segment, each segment padded to its group's width."""

    rows: Tensor  # int64 [P], the packed row in each place; padding repeats some row of the segment
    places: Tensor  # int64 [T], the place of each packed row
    shapes: tuple[tuple[int, int], ...]  # (segments, width) of each group


@dataclass(frozen=True, slots=True)
class Unrolled:
    """Segments with shared parents, unrolled to E rows of independent sequences: each leaf after all that it
    continues."""

    segments: "Segments"
    cu_seqlens: Tensor  # int32
    rows: Tensor  # int64 [E], the packed row in each place
    places: Tensor  # int64 [T], the first place of each packed row


class Segments:
    """Lengths of concatenated segments; some may be 0.

    `parents`: the earlier segment that each continues, whose rows it sees, or -1, in depth-first order; None: all are
    independent sequences."""

    def __init__(self, lengths: Sequence[int], parents: Sequence[int] | None = None) -> None:
        self.lengths = tuple(int(length) for length in lengths)
        self.parents = None if parents is None else np.asarray(parents, np.int32)
        self._placed: dict[torch.device, PaddedGroups] = {}
        self._unrolled: dict[torch.device, Unrolled] = {}

    @cached_property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @cached_property
    def rows(self) -> int:
        """T, the total of all segments."""
        return sum(self.lengths)

    def groups_on(self, device: torch.device) -> PaddedGroups:
        """Return the padded layout, built and uploaded once."""
        if device not in self._placed:
            self._placed[device] = _layout(self.lengths, device)
        return self._placed[device]

    def unrolled_on(self, device: torch.device) -> Unrolled:
        """Return the unrolled layout of segments with `parents`, built and uploaded once: for attention without
        parents."""
        if device not in self._unrolled:
            assert self.parents is not None
            self._unrolled[device] = _unroll(self.lengths, self.parents.tolist(), device)
        return self._unrolled[device]


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Group the indices of all non-empty segments by similar length, longest first. O(n log n).

    In each group, the squared lengths padded to the longest sum to at most MAX_PADDED_WORK times the squares
    themselves. Lengths below LEAST_WIDTH count as LEAST_WIDTH."""
    groups: list[list[int]] = []
    square, work = 0, 0  # square of the group's longest; sum of squares of its segments
    for i in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i]):
        own = max(lengths[i], LEAST_WIDTH) ** 2
        if groups and (len(groups[-1]) + 1) * square <= MAX_PADDED_WORK * (work + own):
            groups[-1].append(i)
            work += own
        else:
            groups.append([i])
            square = work = own
    return groups


def _layout(lengths: Sequence[int], device: torch.device) -> PaddedGroups:
    starts = np.cumsum(lengths) - np.asarray(lengths)
    groups = similar_lengths(lengths)
    rows: list[np.ndarray] = []
    places = np.zeros(int(sum(lengths)), np.int64)
    shapes, at = [], 0
    for group in groups:
        width = lengths[group[0]]
        column = np.arange(width)
        own = np.asarray([lengths[i] for i in group])[:, None]
        index = starts[group][:, None] + np.minimum(column, own - 1)  # [segments, width]
        real = column < own
        places[index[real]] = at + np.flatnonzero(real)
        rows.append(index.reshape(-1))
        shapes.append((len(group), width))
        at += index.size
    there = upload({"rows": np.concatenate(rows or [np.zeros(0, np.int64)]), "places": places}, device)
    return PaddedGroups(there["rows"], there["places"], tuple(shapes))


def _unroll(lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> Unrolled:
    starts = np.cumsum(lengths) - np.asarray(lengths)
    paths: list[np.ndarray] = []
    for length, start, parent in zip(lengths, starts, parents, strict=True):
        own = np.arange(start, start + length)
        paths.append(own if parent < 0 else np.concatenate((paths[parent], own)))
    continued = set(parents)
    leaves = [path for segment, path in enumerate(paths) if segment not in continued]
    rows = np.concatenate(leaves)
    found, places = np.unique(rows, return_index=True)
    assert len(found) == sum(lengths)
    whole = [len(path) for path in leaves]
    offsets = np.concatenate(([0], np.cumsum(whole))).astype(np.int32)
    there = upload({"rows": rows, "places": places, "cu_seqlens": offsets}, device)
    return Unrolled(Segments(whole), there["cu_seqlens"], there["rows"], there["places"])
