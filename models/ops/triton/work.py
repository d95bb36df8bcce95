"""Attention's work list: the parts of all contexts, divided among programs on the host.

A fixed grid of programs shares all splits of all tiles evenly, so one long context among many short ones is walked by
many programs. Only the list's contents change from step to step, never its size: a captured graph reads another list.
Splits lie at absolute positions and are merged in order, so no bit depends on the division. FlashInfer and
FlashAttention 3 plan such lists too.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[Any]
SPLIT_TOKENS = 256  # of the context, at absolute positions
# Three for each multiprocessor of an H100, which is what their registers leave room for: all run at once. A constant,
# so that plans depend on shapes alone.
_PROGRAMS = 396


def tile_of(groups: int, dtype: torch.dtype) -> int:
    """Places of a tile, for `groups` query heads per KV head: rows of the queries times groups fill it."""
    return max(32 if dtype is torch.bfloat16 else 16, 1 << max(groups - 1, 0).bit_length())


def programs_of(kv_heads: int) -> int:
    """Programs that share the splits of one KV head."""
    return max(_PROGRAMS // kv_heads, 1)


@dataclass(frozen=True, slots=True)
class WorkList:
    """The list of attention with `tile_rows` rows a tile, walked by `programs`.

    int32 [programs + 1 + 4 items]: where the items of each program begin, and their end; then of each item a request,
    the first of its rows in the tile, the first split, and how many splits follow one another.
    """

    tile_rows: int
    programs: int

    @classmethod
    def of(cls, query_heads: int, kv_heads: int, dtype: torch.dtype) -> "WorkList":
        groups = query_heads // kv_heads
        return cls(tile_of(groups, dtype) // groups, programs_of(kv_heads))

    def size(self, requests: int, rows: int, most: int) -> int:
        """Return the length of the longest list of `requests` requests with `rows` rows in all, at most `most` each."""
        tiles = requests if most <= self.tile_rows else rows // self.tile_rows + requests
        return self.programs + 1 + 4 * (tiles + self.programs)

    def write(self, out: Numbers, query_offsets: Numbers, context_lens: Numbers, *, tree: bool) -> None:
        """Write the list to the beginning of `out`: each split of each tile once.

        Two programs differ by at most one split. query_offsets [requests + 1], context_lens [requests]. tree: a row
        attends to the whole context of its request."""
        programs, tile_rows = self.programs, self.tile_rows
        counts = query_offsets[1:] - query_offsets[:-1]
        if counts.max(initial=0) <= tile_rows:
            request = np.flatnonzero(counts)
            inside = np.zeros_like(request)
            stops = context_lens[request]
        else:
            tiles = -(-counts // tile_rows)
            request = np.repeat(np.arange(len(counts)), tiles)
            inside = (np.arange(len(request)) - np.repeat(tiles.cumsum() - tiles, tiles)) * tile_rows
            stops = context_lens[request]
            if not tree:
                stops = stops - counts[request] + np.minimum(inside + tile_rows, counts[request])
        splits = -(-stops // SPLIT_TOKENS)
        ends = splits.cumsum(dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        begins = ends - splits
        shares = np.arange(programs + 1) * total // programs
        cuts = np.concatenate((begins, shares[:-1])) if total else begins
        cuts.sort()
        cuts = cuts[np.concatenate((cuts[:1] < total, cuts[1:] > cuts[:-1]))]
        tile = ends.searchsorted(cuts, side="right")
        out[: programs + 1] = cuts.searchsorted(shares)
        items = out[programs + 1 : programs + 1 + 4 * len(cuts)].reshape(-1, 4)
        items[:, 0] = request[tile]
        items[:, 1] = inside[tile]
        items[:, 2] = cuts - begins[tile]
        items[:-1, 3] = cuts[1:] - cuts[:-1]
        items[-1:, 3] = total - cuts[-1:]
