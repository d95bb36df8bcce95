"""The smallest engine: a paged KV cache without a scheduler, to compare cached with packed forwards."""

import torch
from torch import Tensor

from models import ops
from models.transformer import Transformer

BLOCK_TOKENS = 16


class CachedContext:
    """One forward of `counts[b]` new tokens for each request b, whose first `starts[b]` tokens are in the cache."""

    def __init__(self, cache: "Cache", requests: list[int], starts: list[int], counts: list[int]) -> None:
        self._cache = cache
        self._tables = cache.tables[requests]
        self._offsets = torch.tensor([0, *counts]).cumsum(0).int()
        self._context_lens = torch.tensor([s + c for s, c in zip(starts, counts, strict=True)], dtype=torch.int32)
        spans = [torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]
        self.positions = torch.cat(spans)
        rows = torch.repeat_interleave(torch.arange(len(requests)), torch.tensor(counts))
        self._slots = self._tables[rows, self.positions // BLOCK_TOKENS].long() * BLOCK_TOKENS
        self._slots += self.positions % BLOCK_TOKENS

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        ops.write_kv(k, v, keys, values, self._slots)
        return ops.paged_attention(
            q,
            keys,
            values,
            self._tables,
            self._offsets,
            self._context_lens,
            BLOCK_TOKENS,
            q.shape[-1] ** -0.5,
        )


class Cache:
    """Blocks of the requests are interleaved and in random order; what was never written is NaN."""

    def __init__(self, model: Transformer, requests: int, max_tokens: int, seed: int = 0) -> None:
        config = model.config
        blocks = -(-max_tokens // BLOCK_TOKENS)
        order = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(seed))
        self.tables = order.view(requests, blocks).int()
        shape = (config.num_layers, requests * blocks * BLOCK_TOKENS, config.num_kv_heads, config.head_dim)
        dtype = model.norm.weight.dtype
        self.keys = torch.full(shape, torch.nan, dtype=dtype)
        self.values = torch.full(shape, torch.nan, dtype=dtype)


@torch.no_grad()
def forward(
    model: Transformer, cache: Cache, requests: list[int], starts: list[int], pieces: list[Tensor]
) -> list[Tensor]:
    """Logits [n, V] of each request's next tokens."""
    counts = [len(piece) for piece in pieces]
    context = CachedContext(cache, requests, starts, counts)
    return list(model.logits(model(torch.cat(pieces), context)).split(counts))
