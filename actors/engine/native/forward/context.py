"""Block KV cache and the attention context over it: the engine's side of `models.transformer.AttentionContext`.

Owns the cache tensors. One context serves prompt chunks, decoding rows and drafted rows alike: each request's rows are
the last rows of its context.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.native.forward.kv_memory import KVMemory, kv_memory
from models import ops
from models.config import ModelConfig
from models.ops.native import kernels

MakeMemory = Callable[[int, torch.device], KVMemory]


class KVCache:
    """Keys and values per layer, [slots, Hkv, D], slots = blocks * block_tokens, in the model's dtype.

    `all_keys` and `all_values` are those of all layers, [layers, slots, Hkv, D]. None of them may be used between
    `sleep` and `wake`.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        make_memory: MakeMemory = kv_memory,
    ) -> None:
        """make_memory: allocates this many bytes on a device."""
        self.block_tokens, self._dtype = block_tokens, dtype
        self._shape = (2, config.num_layers, blocks * block_tokens, config.num_kv_heads, config.head_dim)
        self._memory = make_memory(math.prod(self._shape) * dtype.itemsize, torch.device(device))
        self._view()

    def _view(self) -> None:
        self.all_keys, self.all_values = self._memory.tensor.view(self._dtype).view(self._shape).unbind(0)
        self.keys, self.values = list(self.all_keys.unbind(0)), list(self.all_values.unbind(0))

    def sleep(self) -> None:
        """Release the memory; its contents are lost."""
        self.all_keys = self.all_values = torch.empty(0)  # no view may keep the memory alive
        self.keys, self.values = [], []
        self._memory.sleep()

    def wake(self) -> bool:
        """Allocate memory again. Return whether every address is unchanged."""
        stays = self._memory.wake()
        self._view()
        return stays

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks, every layer; int64 [N] each. All sources are read before any target is written."""
        for cache in (self.all_keys, self.all_values):
            blocks = cache.view(cache.shape[0], -1, self.block_tokens, *cache.shape[2:])
            blocks[:, target] = blocks[:, source]

    def move(self, moves: NDArray[np.int64]) -> None:
        """Copy K/V between slots on CPU, every layer: [2, N], (from, to), no slot written before it is read."""
        if not hasattr(kernels, "move_rows"):
            self.move_slots(*torch.from_numpy(moves))
            return
        layers, slots = self.all_keys.shape[:2]
        row_bytes = self.all_keys[0, 0].nbytes
        for cache in (self.all_keys, self.all_values):
            kernels.move_rows(cache.data_ptr(), layers, slots, row_bytes, moves, moves.shape[1])  # type: ignore[union-attr]

    def move_slots(self, source: Tensor, target: Tensor) -> None:
        """Same as `move` with int64 [N] tensors of the cache's device."""
        with torch.inference_mode():
            for cache in (self.all_keys, self.all_values):
                cache[:, target] = cache[:, source]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedContext:
    """The T rows of one engine step, packed by request."""

    cache: KVCache
    positions: Tensor  # int64 [T]
    kv_slots: Tensor  # int64 [T], where each row's K/V go
    block_tables: Tensor  # int32 [R, M]
    query_offsets: Tensor  # int32 [R + 1]
    context_lens: Tensor  # int32 [R], with this step's rows
    max_query: int
    max_context: int
    tree_mask: Tensor | None = None  # uint8 [T, W], see ops.paged_attention

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v to the cache, then attend: q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        ops.write_kv(k, v, keys, values, self.kv_slots)
        return ops.paged_attention(
            q,
            keys,
            values,
            self.block_tables,
            self.query_offsets,
            self.context_lens,
            self.cache.block_tokens,
            q.shape[-1] ** -0.5,
            tree_mask=self.tree_mask,
            max_query=self.max_query,
            max_context=self.max_context,
        )
