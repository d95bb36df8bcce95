"""Chains of drafts by a copy of the target over the target's own KV cache, on CPU.

The written K/V are provisional (`drafter.protocol.TargetPasses`). The caller sets the depth and verifies.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.types import Int64Array
from actors.engine.native.forward.context import CachedContext, KVCache
from actors.engine.native.forward.fused import draft_chain
from config.strategy import Strategy
from drafter.protocol import BatchView, GraphCapture
from models import ops
from models.transformer import Transformer


class CpuChains:
    """TargetPasses of an engine on CPU."""

    def __init__(self, table: SlotTable, cache: KVCache) -> None:
        self._table, self._cache = table, cache
        self.captured = False
        self._copy: Transformer | None = None  # the copy of `_native`
        self._native: ops.DraftChain | None = None

    def plan_graphs(
        self,
        copy: Transformer,
        drafts: Sequence[tuple[int, Strategy]],
        graph_capture: GraphCapture,
        truncated: bool = False,
    ) -> None:
        """No effect: there are no graphs on a CPU."""

    def chain(
        self, copy: Transformer, batch: BatchView, depth: int, *, logits: bool = False
    ) -> tuple[Int64Array, Tensor | None]:
        """See `drafter.protocol.TargetPasses`."""
        if self._copy is not copy:
            self._copy, self._native = copy, draft_chain(copy)
        if self._native is None:
            return self.separate_passes(copy, batch, depth, logits=logits)
        kept = None
        if logits:
            kept = copy.embed_tokens.weight.new_empty(len(batch.slots), depth, batch.vocab_size)
        with torch.inference_mode():
            tokens = self._native.draft(
                depth,
                batch.slots,
                batch.lengths,
                batch.prompt_lengths,
                np.minimum(batch.room, depth),
                batch.history,
                self._table.block_tables,
                self._cache.block_tokens,
                self._cache.all_keys,
                self._cache.all_values,
                batch.temperatures,
                batch.top_k,
                batch.top_p,
                batch.noise_keys,
                kept,
            )
        return tokens.numpy(), kept

    def separate_passes(
        self, copy: Transformer, batch: BatchView, depth: int, *, logits: bool = False
    ) -> tuple[Int64Array, Tensor | None]:
        """Same as `chain`, by passes of the copy's own modules: the oracle of the native call, and the fallback without
        it."""
        requests = len(batch.slots)
        counts = np.minimum(batch.room, depth)
        tokens = np.full((requests, depth), -1, np.int64)
        kept = copy.embed_tokens.weight.new_zeros(requests, depth, batch.vocab_size) if logits else None
        with torch.inference_mode():
            for level in range(depth):
                rows = np.flatnonzero(counts > level)
                if not rows.size:
                    break
                last = tokens[rows, level - 1] if level else batch.history[batch.slots[rows], batch.lengths[rows] - 1]
                found = self._pass(copy, batch, rows, last.astype(np.int64), level)
                tokens[rows, level], least = self._draw(found, batch, rows, level)
                if kept is not None:
                    kept[torch.from_numpy(rows), level] = found.masked_fill(found < least[:, None], -torch.inf)
        return tokens, kept

    def _pass(self, copy: Transformer, batch: BatchView, rows: Int64Array, last: Int64Array, level: int) -> Tensor:
        """Return logits [N, V] behind the `last` token of those requests, `level` tokens behind the known ones."""
        positions, slots = batch.lengths[rows] - 1 + level, batch.slots[rows]
        tables, block_tokens = self._table.block_tables[slots], self._cache.block_tokens
        blocks = tables[np.arange(len(rows)), positions // block_tokens].astype(np.int64)
        context = CachedContext(
            cache=self._cache,
            positions=torch.from_numpy(positions),
            kv_slots=torch.from_numpy(blocks * block_tokens + positions % block_tokens),
            block_tables=torch.from_numpy(tables),
            query_offsets=torch.arange(len(rows) + 1, dtype=torch.int32),
            context_lens=torch.from_numpy((positions + 1).astype(np.int32)),
            max_query=1,
            max_context=int(positions.max()) + 1,
        )
        return copy.logits(copy(torch.from_numpy(last), context))

    def _draw(self, logits: Tensor, batch: BatchView, rows: Int64Array, level: int) -> tuple[Int64Array, Tensor]:
        """Return tokens [N], and the smallest logit that each draw could have, [N]."""
        temperature, top_k, top_p, keys = (
            torch.from_numpy(each[rows]) for each in (batch.temperatures, batch.top_k, batch.top_p, batch.noise_keys)
        )
        positions = torch.from_numpy(batch.lengths[rows] - batch.prompt_lengths[rows] + level)
        least = torch.full((len(rows),), -torch.inf)
        if bool((top_k > 0).any()) or bool((top_p < 1).any()):
            least = ops.cutoff(logits, temperature, top_k, top_p)
        drawn: Int64Array = ops.sample(logits, least, temperature, keys, positions)[0].numpy()
        return drawn, least
