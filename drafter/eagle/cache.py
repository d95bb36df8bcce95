"""The drafter's K/V cache: one layer over the target's own blocks, and scratch blocks for drafted tokens.

Owns the cache and, per slot, the valid positions in it. A request's context begins at position `start`, since its first
hidden states may be gone. Position start + i has local index i and is in the i // block_tokens-th block from that of
`start` on. This block holds no shared prompt, since a request that shares a prompt's blocks has no states of it to
store. RoPE uses the target's positions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter.protocol import KVPlaces
from models import ops
from models.config import ModelConfig

Int64Array = NDArray[np.int64]
IDLE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleContext:
    """The rows of one drafter pass (`models.transformer.AttentionContext`)."""

    keys: Tensor
    values: Tensor
    positions: Tensor  # int64 [T]
    kv_slots: Tensor  # int64 [T]
    block_tables: Tensor  # int32 [R, M]
    query_offsets: Tensor  # int32 [R + 1]
    context_lens: Tensor  # int32 [R]
    block_tokens: int
    max_query: int
    max_context: int
    tree_mask: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ops.write_kv(k, v, self.keys, self.values, self.kv_slots)
        return ops.paged_attention(
            q,
            self.keys,
            self.values,
            self.block_tables,
            self.query_offsets,
            self.context_lens,
            self.block_tokens,
            q.shape[-1] ** -0.5,
            tree_mask=self.tree_mask,
            max_query=self.max_query,
            max_context=self.max_context,
        )


@dataclass(frozen=True, slots=True)
class CachePlaces:
    """Locations of the R requests of one `propose`; `start` is the position of local index 0."""

    tables: NDArray[np.int32]  # [R, M]
    start: Int64Array  # [R]
    committed: Int64Array  # [R], local index of the first drafted row
    block_tokens: int

    def slots(self, request: Int64Array, local: Int64Array) -> Int64Array:
        """Return the cache slots of local indices; both [T]."""
        size = self.block_tokens
        return self.tables[request, local // size].astype(np.int64) * size + local % size


class EagleCache:
    """K/V for `blocks` blocks of the target and `scratch_tokens` drafted rows per slot."""

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        blocks: int,
        block_tokens: int,
        scratch_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_tokens, self._blocks, self.slots = block_tokens, blocks, slots
        self._scratch = -(-scratch_tokens // block_tokens) + 1
        self.reserved_slot = (blocks + slots * self._scratch) * block_tokens  # for padding rows; never read
        shape = (self.reserved_slot + 1, config.num_kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.start = np.full(slots, IDLE, np.int64)  # IDLE: nothing is valid
        self.known = np.zeros(slots, np.int64)  # positions [start, known) are valid

    def reset(self, slot: int | None = None) -> None:
        """Forget one slot, or all."""
        self.start[slice(None) if slot is None else slot] = IDLE

    def columns(self, max_tokens: int) -> int:
        """Return the widest table of requests with `max_tokens` tokens."""
        return -(-max_tokens // self.block_tokens) + self._scratch

    def places(self, kv: KVPlaces, slots: Int64Array, lengths: Int64Array) -> CachePlaces:
        """Return tables of requests whose `start` is set: the target's blocks up to the last known token's, then
        scratch."""
        size, blocks = self.block_tokens, kv.block_tables
        base = self.start[slots] // size
        own = (lengths - 1 - self.start[slots]) // size + 1  # [R] allocated blocks of the target
        # The host's largest arrays at long contexts, so one pass over them. Entries behind a row's scratch are not
        # read.
        index = (slots * blocks.shape[1] + base)[:, None] + np.arange(int(own.max()) + self._scratch)
        tables = blocks.reshape(-1).take(index, mode="clip").astype(np.int32, copy=False)
        column = np.arange(self._scratch)
        scratch = self._blocks + slots[:, None] * self._scratch + column
        tables[np.arange(len(slots))[:, None], own[:, None] + column] = scratch
        return CachePlaces(tables, self.start[slots], lengths - 1 - self.start[slots], size)

    def context(
        self,
        places: CachePlaces,
        positions: Int64Array,
        kv_slots: Int64Array,
        rows: Int64Array,
        context_lens: Int64Array,
        tree_mask: NDArray[np.uint8] | None = None,
    ) -> EagleContext:
        """Build the context of a pass of rows[r] rows per request, the last of its context_lens[r] local tokens."""
        device = self.keys.device
        offsets = np.zeros(len(rows) + 1, np.int32)
        offsets[1:] = rows.cumsum()

        def there(array: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return EagleContext(
            keys=self.keys,
            values=self.values,
            positions=there(positions),
            kv_slots=there(kv_slots),
            block_tables=there(places.tables),
            query_offsets=there(offsets),
            context_lens=there(context_lens.astype(np.int32)),
            block_tokens=self.block_tokens,
            max_query=int(rows.max()),
            max_context=int(context_lens.max()),
            tree_mask=None if tree_mask is None else there(tree_mask),
        )
