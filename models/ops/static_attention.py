"""Paged attention of static shapes in torch, for CUDA graphs: nothing depends on the data, nothing waits for the host.

`StaticPages` is computed once per step and serves every layer. Equal to `reference.paged_attention` to rounding. Knows
nothing of the native extension; never writes the cache.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StaticPages:
    """Where the keys of B requests lie and which of them each of their n query rows sees."""

    slots: Tensor  # int64 [B, C]; columns past a request's context read `zero_slot`
    bias: Tensor  # [B, 1, G n, C] in the dtype of the queries: 0 or -inf; G query heads per KV head

    @classmethod
    def of(
        cls,
        block_tables: Tensor,
        query_lens: Tensor,
        context_lens: Tensor,
        tree_mask: Tensor | None,
        *,
        rows: int,
        groups: int,
        block_tokens: int,
        zero_slot: int,
        dtype: torch.dtype,
    ) -> "StaticPages":
        """int32 block_tables [B, M] with C = M * block_tokens; query_lens, context_lens int32 [B]: request b has
        query_lens[b] <= rows real rows, the last of its context_lens[b] tokens. Rows behind them see what is allowed
        by tree_mask too, and are computed for nothing.

        tree_mask uint8 [B * rows, rows], as in `ops.paged_attention`; None only for one row per request.
        zero_slot: a cache slot that holds finite values always, so that what is masked cannot turn into NaN.
        """
        if tree_mask is None and rows != 1:
            raise ValueError(f"{rows} rows per request need a tree_mask")
        requests, width = block_tables.shape
        column = torch.arange(width * block_tokens, device=block_tables.device)  # [C]
        slots = block_tables.long()[:, column // block_tokens] * block_tokens + column % block_tokens
        known = column < context_lens[:, None]
        slots = torch.where(known, slots, slots.new_full((), zero_slot))
        if tree_mask is None:
            seen = known[:, None]  # [B, 1, C]
        else:
            start = (context_lens - query_lens)[:, None, None]  # position of each request's first row
            among = (column - start).expand(-1, rows, -1)  # [B, n, C]: which of the rows a column is
            allowed = tree_mask.view(requests, rows, rows).bool().gather(2, among.clamp(0, rows - 1))
            seen = (allowed | (among < 0)) & known[:, None]
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)
        bias = bias[:, None].expand(-1, groups, -1, -1).reshape(requests, 1, groups * rows, -1)
        return cls(slots, bias)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """q [B * n, Hq, D]; caches [slots, Hkv, D] -> [B * n, Hq, D]."""
        requests = self.slots.shape[0]
        total, query_heads, head_dim = q.shape
        kv_heads = k_cache.shape[1]
        groups, rows = query_heads // kv_heads, total // requests
        # Query heads of one KV head become rows: no copies of keys, and kernels that know no groups will do.
        folded = q.view(requests, rows, kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(requests, kv_heads, groups * rows, head_dim)
        keys, values = k_cache[self.slots].transpose(1, 2), v_cache[self.slots].transpose(1, 2)  # [B, Hkv, C, D]
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=self.bias, scale=scale)
        out = out.view(requests, kv_heads, groups, rows, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(total, query_heads, head_dim)
