"""`reference.NumpySteps` by the native extension (native/steps.h). Owns the output arrays of steps."""

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
from contracts.rollout import FinishReason
from models.ops.native import kernels

_STOPPED, _ENDED, _DUE = 1, 2, 4
_BY_ROW = ("tokens", "positions", "kv_slots")
_BY_DRAW = ("noise_keys", "noise_positions", "temperature")


class NativeSteps:
    """Array work over a table with fixed array addresses (`stop` may be replaced)."""

    def __init__(self, table: SlotTable, block_tokens: int) -> None:
        slots = len(table.length)
        self._table, self._block_tokens = table, block_tokens
        self._kernels = kernels.StepKernels(table, block_tokens)  # type: ignore[union-attr]
        self._emitted, self._accepted = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._flags = np.zeros(slots, np.uint8)
        self._shape: tuple[int, ...] = ()
        self._views: dict[str, NDArray[np.generic]] = {}
        self.resize(slots, 1)

    def resize(self, max_rows: int, mask_bytes: int) -> None:
        slots, width = self._table.block_tables.shape
        whole = dict.fromkeys((*_BY_ROW, "sample_rows", "noise_keys", "noise_positions", "top_k"), np.int64)
        self._out: dict[str, NDArray[np.generic]] = {name: np.zeros(max_rows, dtype) for name, dtype in whole.items()}
        self._out |= {name: np.zeros(max_rows, np.float32) for name in ("temperature", "top_p")}
        self._out["query_offsets"] = np.zeros(slots + 1, np.int32)
        self._out["context_lens"] = np.zeros(slots, np.int32)
        self._out["block_tables"] = np.zeros(slots * width, np.int32)
        self._out["tree_mask"] = np.zeros(mask_bytes, np.uint8)
        self._shape = ()

    def clean(
        self, slots: Int64Array, tokens: object, counts: object, parents: object, depth: int, nodes: int, vocab: int
    ) -> tuple[StepDrafts, bool] | None:
        requests = len(slots)
        arrays = as_drafts(tokens, counts, requests)
        if arrays is None:
            return None
        given, lengths = arrays
        width = min(given.shape[1], nodes, nodes if parents is not None else depth)
        if width <= 0:
            return None
        given = given if given.strides[1] == 8 or width == 1 else np.ascontiguousarray(given)
        out, kept = np.empty((requests, width), np.int64), np.empty(requests, np.int64)
        before = out_parents = depths = None
        if parents is not None:
            before = as_parents(parents, requests, width)
            if before is None:
                return None
            before = before if before.strides[1] == 8 or width == 1 else np.ascontiguousarray(before)
            out_parents, depths = np.empty_like(out), np.empty_like(out)
        drafted, short = self._kernels.clean(
            slots, given, lengths, before, width, depth, vocab, out, kept, out_parents, depths
        )
        return (
            (StepDrafts(counts=kept, tokens=out, parents=out_parents, depths=depths, drafted=drafted), short)
            if drafted
            else None
        )

    def rows(self, plan: StepPlan, drafts: StepDrafts | None) -> StepRows:
        total, most, max_context, sampled, truncated = self._kernels.rows(
            plan.slots, plan.rows, plan.samples, *_parts(drafts), self._out
        )
        width = 0 if drafts is None or drafts.parents is None else drafts.parents.shape[1] + 1
        blocks = -(-max_context // self._block_tokens)
        shape = (total, len(plan.slots), blocks, sampled, truncated, width)
        if shape != self._shape:  # views of the same memory serve every step of this shape
            self._shape, self._views = shape, self._cut(*shape)
        return StepRows(self._views, most, max_context, sampled, truncated)

    def _cut(
        self, total: int, requests: int, blocks: int, sampled: int, truncated: bool, mask_width: int
    ) -> dict[str, NDArray[np.generic]]:
        out = self._out
        views = {name: out[name][:total] for name in _BY_ROW}
        views |= {"query_offsets": out["query_offsets"][: requests + 1], "context_lens": out["context_lens"][:requests]}
        views["block_tables"] = out["block_tables"][: requests * blocks].reshape(requests, blocks)
        views |= {name: out[name][:sampled] for name in _BY_DRAW}
        if truncated:
            views |= {name: out[name][:sampled] for name in ("top_k", "top_p")}
        if 0 < sampled < total:
            views["sample_rows"] = out["sample_rows"][:sampled]
        if mask_width:
            views["tree_mask"] = out["tree_mask"][: total * mask_width].reshape(total, mask_width)
        return views

    def settle(
        self,
        plan: StepPlan,
        tokens: Int64Array,
        logprobs: Float32Array,
        logprobs_t1: Float32Array,
        drafts: StepDrafts | None,
        progress_every: int,
    ) -> Settled:
        path = moves = None
        if drafts is not None and drafts.parents is not None:
            sampling, width = drafts.tokens.shape
            path, moves = np.empty((sampling, width + 1), np.int64), np.empty((2, sampling * width), np.int64)
        new_tokens, accepted_tokens, moved, flagged = self._kernels.settle(
            plan.slots,
            plan.rows,
            plan.samples,
            tokens,
            logprobs,
            logprobs_t1,
            *_parts(drafts),
            self._table.stop,
            progress_every,
            self._emitted,
            self._accepted,
            self._flags,
            path,
            moves,
        )
        ended: list[tuple[int, FinishReason]] = []
        due: list[int] = []
        if flagged:
            slots = plan.slots if plan.samples.all() else plan.slots[plan.samples]
            for slot, flag in zip(slots.tolist(), self._flags[: len(slots)].tolist(), strict=True):
                if flag & _ENDED:
                    ended.append((slot, FinishReason.STOP if flag & _STOPPED else FinishReason.LENGTH))
                elif flag & _DUE:
                    due.append(slot)
        if drafts is None:
            return Settled(new_tokens=new_tokens, ended=ended, due=due)
        sampling = len(drafts.tokens)
        return Settled(
            new_tokens=new_tokens,
            ended=ended,
            due=due,
            emitted=self._emitted[:sampling].copy(),
            accepted=self._accepted[:sampling].copy(),
            accepted_tokens=accepted_tokens,
            path=path,
            moves=moves[:, :moved] if moves is not None and moved else None,
        )


def _parts(drafts: StepDrafts | None) -> tuple[Int64Array | None, ...]:
    if drafts is None:
        return None, None, None, None
    return drafts.counts, drafts.tokens, drafts.parents, drafts.depths
