"""Early text: what an idle worker sampled of a response with older weights, checked here under the present ones.

Owns which tokens of it a step checks, and when it is given up; the acceptance law is that of drafts (`step.types`). So
it never changes a token: noise is a function of the request's key and the token's position, and what equals the
target's own draw stands. K/V and log-probs are those of the check.

Text is offered while the response agrees with it token for token. After the first difference it is dropped: hostile
text costs a request one chunk.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.plan import PromptEntry, StepPlan
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.build import StepArrays
from actors.engine.batch.step.types import Int64Array, Settled, StepDrafts

ROWS = 256  # early tokens that one step checks at most: about where a pass on a GPU leaves its memory-bound floor
LEAST = 4  # of one request: with less the pass costs more than it may bring

Reserve = Callable[[Int64Array, Int64Array], Int64Array]  # slots, counts [n]: the counts for which there is KV cache


class EarlyTexts:
    """Of the requests that run. Implements `plan.SlotWatcher`."""

    def __init__(self, table: SlotTable, steps: StepArrays, vocab_size: int, rows: int = ROWS) -> None:
        self._table, self._steps, self._vocab_size, self._rows = table, steps, vocab_size, rows
        self._texts: dict[int, NDArray[np.int32]] = {}  # by slot: the response agrees with it so far
        self._there = np.zeros(len(table.length), np.bool_)  # slots that have one

    def begin(self, slot: int, prompt: PromptEntry | None) -> None:
        """See SlotWatcher. What a request that comes with a prefix has already is not checked again."""
        text = self._table.early[slot]
        if text is None:
            return
        known = self._table.tokens[slot, self._table.prompt_length[slot] : self._table.length[slot]]
        if len(text) > len(known) and np.array_equal(text[: len(known)], known):
            self._texts[slot] = text
            self._there[slot] = True

    def end(self, slot: int, finished: bool) -> None:
        """See SlotWatcher."""
        self._drop(slot)

    def _drop(self, slot: int) -> None:
        self._texts.pop(slot, None)
        self._there[slot] = False

    def draft(self, plan: StepPlan, reserve: Reserve) -> StepDrafts | None:
        """What the step checks, put behind the last known tokens in the token table; None: nothing.

        All decoding requests with early text share `rows`, at least LEAST each, the first of them first.
        """
        if not self._texts:
            return None
        places = np.flatnonzero(self._there[plan.slots] & (plan.rows == 1) & plan.samples)
        if not places.size:
            return None
        chunk = max(self._rows // len(places), min(LEAST, self._rows))
        places = places[: self._rows // chunk]
        slots = plan.slots[places]
        tokens, counts = np.full((len(slots), chunk), -1, np.int64), np.zeros(len(slots), np.int64)
        known = (self._table.length - self._table.prompt_length)[slots].tolist()
        for i, slot in enumerate(slots.tolist()):
            part = self._texts[slot][known[i] : known[i] + chunk]
            tokens[i, : len(part)], counts[i] = part, len(part)
        cleaned = self._steps.clean(slots, tokens, counts, None, chunk, chunk, self._vocab_size)
        if cleaned is None:
            return None
        drafts, short_of_blocks = cleaned
        if short_of_blocks:
            drafts = drafts.cut(reserve(slots, drafts.counts))
        if not drafts.drafted:
            return None
        if len(places) == len(plan.slots):
            return drafts
        counts, tokens = np.zeros(len(plan.slots), np.int64), np.full((len(plan.slots), chunk), -1, np.int64)
        counts[places], tokens[places, : drafts.tokens.shape[1]] = drafts.counts, drafts.tokens
        return StepDrafts(counts=counts, tokens=tokens[plan.samples], drafted=drafts.drafted)

    def drew(self, plan: StepPlan) -> None:
        """After a step: whose last token differs has no early text any more, nor who has used it up."""
        if not self._texts:
            return
        table = self._table
        for slot in plan.slots[self._there[plan.slots] & plan.samples].tolist():
            text, known = self._texts[slot], int(table.length[slot] - table.prompt_length[slot])
            if known >= len(text) or text[known - 1] != table.tokens[slot, table.length[slot] - 1]:
                self._drop(slot)

    def uncount(self, plan: StepPlan, checked: StepDrafts, settled: Settled) -> None:
        """What the table counts as drafted is what drafters are judged by: early text is none of theirs."""
        if settled.accepted is not None:
            slots = plan.slots[plan.samples]
            self._table.drafted[slots] -= checked.counts[plan.samples]
            self._table.accepted[slots] -= settled.accepted
        if settled.emitted is not None:  # nor are the steps that it spared
            self._table.spared_steps[plan.slots[plan.samples]] -= settled.emitted - 1
