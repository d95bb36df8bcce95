"""A step's array work in numpy: the oracle of the native kernels, and the fallback without them."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.plan import StepPlan
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.types import (
    Float32Array,
    Int64Array,
    Settled,
    StepDrafts,
    StepRows,
    as_drafts,
    as_parents,
)
from actors.engine.batch.step.verify import accept, accept_tree
from contracts.rollout import FinishReason


class NumpySteps:
    """Array work over one SlotTable."""

    def __init__(self, table: SlotTable, block_tokens: int) -> None:
        self._table, self._block_tokens = table, block_tokens

    def resize(self, max_rows: int, mask_bytes: int) -> None:
        """Reserve memory for the largest step. No effect here: every step allocates its own arrays."""

    def clean(
        self, slots: Int64Array, tokens: object, counts: object, parents: object, depth: int, nodes: int, vocab: int
    ) -> tuple[StepDrafts, bool] | None:
        """Cut untrusted drafts of the requests in `slots` at the first unusable node, and put them into the token
        table.

        Unusable: outside the vocabulary, past `nodes` or the request's limit, a parent that does not come before it,
        deeper than `depth`, a duplicate of a sibling. The returned flag: some request needs more KV blocks. Returns
        None if nothing usable is left or the arrays are malformed (wrong rank, wrong number of requests, not integers).
        """
        table, requests = self._table, len(slots)
        arrays = as_drafts(tokens, counts, requests)
        if arrays is None:
            return None
        given, lengths = arrays
        width = min(given.shape[1], nodes, nodes if parents is not None else depth)
        if width <= 0:
            return None
        given, index = given[:, :width], np.arange(width)
        length = table.length[slots]
        most = np.minimum(lengths, table.limit[slots] - length - 1)
        usable = (index < most[:, None]) & (given >= 0) & (given < vocab)
        before: Int64Array | None = None
        depths: Int64Array | None = None
        if parents is not None:
            raw = as_parents(parents, requests, width)
            if raw is None:
                return None
            before = raw[:, :width]
            usable &= (before >= -1) & (before < index)
            before, depths = np.where(usable, before, -1), np.ones((requests, width), np.int64)
            rows = np.arange(requests)
            for i in range(width):
                depths[:, i] = np.where(before[:, i] < 0, 1, depths[rows, before[:, i]] + 1)
                twins = (given[:, :i] == given[:, i : i + 1]) & (before[:, :i] == before[:, i : i + 1])
                usable[:, i] &= (depths[:, i] <= depth) & ~twins.any(axis=1)
        usable = np.logical_and.accumulate(usable, axis=1)
        kept = usable.sum(axis=1)
        if not kept.any():
            return None
        if before is not None and depths is not None:
            before, depths = np.where(usable, before, -1), np.where(usable, depths, 0)
        table.tokens[slots.repeat(kept), (length[:, None] + index)[usable]] = given[usable]
        short = bool((length + kept > table.block_counts[slots] * self._block_tokens).any())
        return StepDrafts(
            counts=kept, tokens=np.where(usable, given, -1), parents=before, depths=depths, drafted=int(kept.sum())
        ), short

    def rows(self, plan: StepPlan, drafts: StepDrafts | None) -> StepRows:
        """Build the rows of a forward: known tokens without K/V, then drafts.

        K/V slots are consecutive, positions follow the branch, a draw's noise position follows its row's."""
        table, size, slots = self._table, self._block_tokens, plan.slots
        first = table.computed[slots]  # [R] position of each request's first row
        count = plan.rows if drafts is None else plan.rows + drafts.counts
        offsets = np.zeros(len(slots) + 1, np.int32)
        offsets[1:] = count.cumsum()
        owner = np.arange(len(slots)).repeat(count)  # [T] request of each row
        places = np.arange(len(owner)) - offsets[owner] + first[owner]
        row_slots = slots[owner]
        contexts = (first + count).astype(np.int32)
        positions = places
        arrays: dict[str, NDArray[np.generic]] = {}
        if drafts is not None and drafts.parents is not None and drafts.depths is not None:
            arrays["tree_mask"], depths = _tree(drafts.counts, drafts.parents, drafts.depths)
            positions = first[owner] + depths
        sample_rows = np.flatnonzero(places >= table.length[row_slots] - 1)
        sampling = row_slots[sample_rows]
        top_k, top_p = table.top_k[sampling], table.top_p[sampling]
        truncated = bool(((top_k > 0) | (top_p < 1)).any())
        blocks = -(-int(contexts.max()) // size)
        arrays |= {
            "tokens": table.tokens[row_slots, places].astype(np.int64),
            "positions": positions,
            "kv_slots": table.block_tables[row_slots, places // size].astype(np.int64) * size + places % size,
            "query_offsets": offsets,
            "context_lens": contexts,
            "block_tables": table.block_tables[slots, :blocks],
            "noise_keys": table.noise_key[sampling],
            "noise_positions": positions[sample_rows] + 1 - table.noise_origin[sampling],
            "temperature": table.temperature[sampling],
        }
        if truncated:
            arrays |= {"top_k": top_k, "top_p": top_p}
        if 0 < len(sample_rows) < len(owner):
            arrays["sample_rows"] = sample_rows
        return StepRows(arrays, int(count.max()), int(contexts.max()), len(sample_rows), truncated)

    def settle(
        self,
        plan: StepPlan,
        tokens: Int64Array,
        logprobs: Float32Array,
        logprobs_t1: Float32Array,
        drafts: StepDrafts | None,
        progress_every: int,
    ) -> Settled:
        """Apply the accept rule: from the last known token on, take the target's draw.

        Continue while the draw is among the children drafted there, and neither a stop token nor the request's last.
        Draws [N] are those of `rows`, in order. Writes tokens, log-probs and lengths into the table. Every emitted
        token is the target's own draw at its position, so tokens are the same with and without speculation, whatever
        was drafted.
        """
        table = self._table
        table.computed[plan.slots] += plan.rows
        slots = plan.slots[plan.samples]
        if not len(slots):
            return Settled(new_tokens=0, ended=[], due=[])
        length = table.length[slots]
        counts = np.zeros(len(slots), np.int64) if drafts is None else drafts.counts[plan.samples]
        width = 0 if drafts is None else drafts.tokens.shape[1]
        column = np.arange(width + 1)
        source = (counts + 1).cumsum()[:, None] - counts[:, None] - 1 + np.minimum(column, counts[:, None])  # [S, K+1]
        drafted = np.zeros((len(slots), 0), np.int64) if drafts is None else drafts.tokens
        stop, remaining = table.stop[slots], table.limit[slots] - length
        path: Int64Array | None = None
        moves: Int64Array | None = None
        if drafts is None or drafts.parents is None:
            emitted, accepted, stopped = accept(tokens[source], drafted, stop, remaining)
        else:
            emitted, accepted, stopped, path = accept_tree(tokens[source], drafted, drafts.parents, stop, remaining)
            moves = self._moves(slots, length, path, emitted)
            source = np.take_along_axis(source, path, axis=1)
        kept = column < emitted[:, None]
        rows, places = slots.repeat(emitted), (length[:, None] + column)[kept]
        table.tokens[rows, places] = tokens[source[kept]]
        table.logprobs[rows, places] = logprobs[source[kept]]
        table.logprobs_t1[rows, places] = logprobs_t1[source[kept]]
        # K/V of accepted drafts stay; later ones are overwritten before they can be read
        table.length[slots], table.computed[slots] = length + emitted, length + emitted - 1
        table.spared_steps[slots] += emitted - 1
        over = stopped | (emitted == remaining)
        due = (length + emitted - table.reported[slots] >= progress_every) & ~over
        reasons = (FinishReason.LENGTH, FinishReason.STOP)
        ended = [(int(slots[i]), reasons[int(stopped[i])]) for i in np.flatnonzero(over)]
        settled = Settled(new_tokens=int(emitted.sum()), ended=ended, due=slots[due].tolist())
        if drafts is None:
            return settled
        table.drafted[slots] += counts
        table.accepted[slots] += accepted
        stood = int(accepted.sum())
        return replace(settled, emitted=emitted, accepted=accepted, accepted_tokens=stood, path=path, moves=moves)

    def _moves(self, slots: Int64Array, length: Int64Array, path: Int64Array, emitted: Int64Array) -> Int64Array | None:
        """K/V slots (from, to): column path[r, j], at position length[r] - 1 + path[r, j], moves to length[r] - 1 +
        j."""
        step = np.arange(path.shape[1])
        row, place = ((path != step) & (step < emitted[:, None])).nonzero()
        if not len(row):
            return None
        positions = length[row] - 1 + np.stack((path[row, place], place))
        blocks = self._table.block_tables[slots[row], positions // self._block_tokens].astype(np.int64)
        moves: Int64Array = blocks * self._block_tokens + positions % self._block_tokens
        return moves


def _tree(counts: Int64Array, parents: Int64Array, depths: Int64Array) -> tuple[NDArray[np.uint8], Int64Array]:
    """Return (mask [T, K+1]: which rows of its request each row sees; depths [T]) of the rows of R trees, with
    roots."""
    requests, width = parents.shape
    sees = np.zeros((requests, width + 1, width + 1), np.uint8)
    sees[:, 0, 0] = 1
    every = np.arange(requests)
    for i in range(width):
        sees[:, i + 1] = sees[every, parents[:, i] + 1]
        sees[:, i + 1, i + 1] = 1
    filled = np.arange(width + 1) <= counts[:, None]
    all_depths = np.concatenate((np.zeros((requests, 1), np.int64), depths), axis=1)
    return sees[filled], all_depths[filled]
