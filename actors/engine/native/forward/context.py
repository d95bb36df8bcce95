"""Block KV cache and the attention context over it: the engine's side of `models.transformer.AttentionContext`.

Owns the cache tensors. One context serves prompt chunks, decoding rows and drafted rows alike: each request's rows are
the last rows of its context.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models import ops
from models.config import ModelConfig
from models.ops.native import kernels


class KVCache:
    """Keys and values per layer, [slots, Hkv, D], slots = blocks * block_tokens, in the model's dtype.

    `all_keys` and `all_values` are those of all layers, [layers, slots, Hkv, D].
    """

    def __init__(self, config: ModelConfig, blocks: int, block_tokens: int, dtype: torch.dtype, device: str) -> None:
        self.block_tokens = block_tokens
        shape = (config.num_layers, blocks * block_tokens, config.num_kv_heads, config.head_dim)
        self.all_keys, self.all_values = _zeros(shape, dtype, device), _zeros(shape, dtype, device)
        self.keys, self.values = list(self.all_keys.unbind(0)), list(self.all_values.unbind(0))

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks, every layer; int64 [N] each. All sources are read before any target is written."""
        for cache in (self.all_keys, self.all_values):
            blocks = cache.view(cache.shape[0], -1, self.block_tokens, *cache.shape[2:])
            blocks[:, target] = blocks[:, source]

    def move(self, moves: NDArray[np.int64]) -> None:
        """Copy K/V between slots, every layer: [2, N], (from, to), without a slot that is written before it is read."""
        caches = (self.all_keys, self.all_values)
        layers, slots = self.all_keys.shape[:2]
        if self.all_keys.device.type == "cpu" and hasattr(kernels, "move_rows"):
            row_bytes = self.all_keys[0, 0].nbytes
            for cache in caches:
                kernels.move_rows(cache.data_ptr(), layers, slots, row_bytes, moves, moves.shape[1])  # type: ignore[union-attr]
            return
        source, target = torch.from_numpy(moves).to(self.all_keys.device)
        with torch.inference_mode():
            for cache in caches:
                cache[:, target] = cache[:, source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page; numpy's are not backed by memory until they are used.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedContext:
    """The T rows of one engine step, packed by request."""

    cache: KVCache
    positions: Tensor  # int64 [T]
    kv_slots: Tensor  # int64 [T], where each row's K/V go
    block_tables: Tensor  # int32 [R, M]
    query_offsets: Tensor  # int32 [R + 1]
    context_lens: Tensor  # int32 [R], this step's rows included
    max_query: int
    max_context: int
    tree_mask: Tensor | None = None  # uint8 [T, W], see ops.paged_attention

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]; k and v enter the cache first."""
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
