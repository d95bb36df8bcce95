"""Asks the drafter, and makes what it answers safe to verify. Owns the active drafter and its counts.

A draft may be anything: what is malformed, too long or outside the vocabulary is cut off here, and a drafter that
raises is heard once in the log and not asked again until `use` is called. Tokens never depend on any of it (`verify`).
"""

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.engine.native.scheduler import Scheduler, StepPlan
from actors.engine.native.slots import SlotTable
from actors.engine.native.verify import clean_drafts
from drafter.protocol import BatchView, Drafter

Int64Array = NDArray[np.int64]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """Drafts of one step, already behind the last known tokens in the token table."""

    counts: Int64Array  # [R], per request of the plan
    tokens: Int64Array  # [R', K], of the plan's sampling requests, padded with -1


class Speculator:
    """Turns a plan into drafts, or into None: then the step is plain decoding."""

    def __init__(self, table: SlotTable, vocab_size: int, max_depth: int) -> None:
        self._table, self._vocab_size, self._max_depth = table, vocab_size, max_depth
        self._drafter: Drafter | None = None
        self._depth = 0
        self.drafted = 0
        self.accepted = 0
        self.faults = 0  # answers that were unusable as a whole

    def use(self, drafter: Drafter | None, depth: int) -> None:
        if not 0 <= depth <= self._max_depth:
            raise ValueError(f"draft depth {depth} is outside 0..{self._max_depth}")
        self._drafter, self._depth = drafter, depth

    def count_accepted(self, accepted: int) -> None:
        self.accepted += accepted

    def draft(self, plan: StepPlan, scheduler: Scheduler) -> StepDrafts | None:
        drafter, table = self._drafter, self._table
        if drafter is None or self._depth == 0:
            return None
        decoding = (plan.rows == 1) & plan.samples  # [R]; a request still in its prompt has nothing to speculate on
        if not decoding.any():
            return None
        slots = plan.slots[decoding]
        try:
            answer = drafter.propose(self._view(slots), self._depth)
            cleaned = clean_drafts(answer.tokens, answer.counts, len(slots), self._depth, self._vocab_size)
        except Exception:
            _log.exception("drafter %s failed and is switched off; decoding goes on", type(drafter).__name__)
            self._drafter = None
            self.faults += 1
            return None
        if cleaned is None:
            return None
        counts = scheduler.reserve_drafts(slots, (cleaned >= 0).sum(axis=1))
        width = int(counts.max())
        if width == 0:
            return None
        kept = np.arange(width) < counts[:, None]
        cleaned = np.where(kept, cleaned[:, :width], -1)
        places = table.length[slots][:, None] + np.arange(width)
        table.tokens[slots.repeat(counts), places[kept]] = cleaned[kept]
        self.drafted += int(counts.sum())
        all_counts = np.zeros(len(plan.slots), np.int64)
        all_counts[decoding] = counts
        tokens = np.full((len(plan.slots), width), -1, np.int64)
        tokens[decoding] = cleaned
        return StepDrafts(all_counts, tokens[plan.samples])

    def _view(self, slots: Int64Array) -> BatchView:
        table = self._table
        history = table.tokens.view()
        history.flags.writeable = False
        return BatchView(
            request_ids=table.request_id[slots],
            prompt_ids=table.prompt_id[slots],
            slots=slots.copy(),
            history=history,
            lengths=table.length[slots],
            prompt_lengths=table.prompt_length[slots],
            noise_keys=table.noise_key[slots],
            temperatures=table.temperature[slots],
            vocab_size=self._vocab_size,
        )
