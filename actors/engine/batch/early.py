"""Early text: a response's draft that an idle worker sampled with older weights, verified here with the present ones.

Chooses which of its tokens a step verifies, and when to drop it. The acceptance rule is that of drafts (`step.types`),
so it never changes a token: noise is a function of the request's key and the token's position, and an early token is
accepted if it equals the target's own draw. K/V and log-probs are those of the verification.

Text is offered in full chunks while the response matches it token for token. After a difference it is still a good
draft: old and new weights draw with the same noise at the same position, so they often agree again. Then only a few
tokens are offered. The first try assumes a replaced token, at the same positions. Later tries assume inserted or
omitted tokens, and look for the response's last tokens in the text, nearest first. After MISSES consecutive steps
without an accepted token the text is dropped, which bounds the cost of bad text.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.plan import PromptEntry, StepPlan
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.build import StepArrays
from actors.engine.batch.step.types import Int64Array, Settled, StepDrafts

ROWS = 256  # most early tokens per step: about where a pass on a GPU stops being memory-bound
LEAST = 4  # fewest per request: with less the pass costs more than it may gain
AGAIN = 8  # most per request, after a difference
_MATCH = 2  # number of last response tokens to look for in the text
MISSES = 4  # consecutive misses before the text is dropped: two omitted tokens and two to find the place

Reserve = Callable[[Int64Array, Int64Array], Int64Array]  # slots, counts [n] -> the counts that fit the KV cache


@dataclass(slots=True)
class _Text:
    """Early text of one request."""

    tokens: NDArray[np.int32]
    known: int  # tokens of the response at the last update
    shift: int = 0  # token i of the response is expected to be tokens[i + shift]
    misses: int = 0  # consecutive updates that took nothing, the first of which may have taken a part

    def drawn(self, response: NDArray[np.int32]) -> bool:
        """Update from the response after a step that may have been offered some text. Return whether the text is still
        useful."""
        taken, self.known = len(response) - self.known - 1, len(response)
        at = self.known + self.shift
        if at >= len(self.tokens):
            return False
        if at > 0 and self.tokens[at - 1] == response[-1]:
            self.misses = 0
            return True
        self.misses = 1 if taken > 0 else self.misses + 1
        if self.misses > MISSES:
            return False
        return self.misses < 2 or self._realign(response)

    def _realign(self, response: NDArray[np.int32]) -> bool:
        """Shift to the nearest place in the text behind the response's last tokens; unchanged if there is none."""
        if len(response) < _MATCH or len(self.tokens) <= _MATCH:
            return True
        windows = np.lib.stride_tricks.sliding_window_view(self.tokens[:-1], _MATCH)
        ends = np.flatnonzero((windows == response[-_MATCH:]).all(1)) + _MATCH
        if ends.size:
            self.shift = int(ends[np.abs(ends - self.known).argmin()]) - self.known
        return True


class EarlyTexts:
    """Early texts of the running requests. Implements `plan.SlotWatcher`."""

    def __init__(self, table: SlotTable, steps: StepArrays, vocab_size: int, rows: int = ROWS) -> None:
        self._table, self._steps, self._vocab_size, self._rows = table, steps, vocab_size, rows
        self._texts: dict[int, _Text] = {}  # by slot
        self._there = np.zeros(len(table.length), np.bool_)  # slots that have a text

    def begin(self, slot: int, prompt: PromptEntry | None) -> None:
        """See SlotWatcher. Tokens of the request's prefix are not verified again."""
        text = self._table.early[slot]
        if text is None:
            return
        known = self._table.tokens[slot, self._table.prompt_length[slot] : self._table.length[slot]]
        if len(text) > len(known) and np.array_equal(text[: len(known)], known):
            self._texts[slot] = _Text(text, len(known))
            self._there[slot] = True

    def end(self, slot: int, finished: bool) -> None:
        """See SlotWatcher."""
        self._drop(slot)

    def _drop(self, slot: int) -> None:
        self._texts.pop(slot, None)
        self._there[slot] = False

    def draft(self, plan: StepPlan, reserve: Reserve) -> StepDrafts | None:
        """Write the early tokens of this step behind the last known tokens of the token table, and return them; None:
        none.

        All decoding requests with early text share `rows`, at least LEAST each; the first requests have priority.
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
            text = self._texts[slot]
            at = known[i] + text.shift
            part = text.tokens[at : at + (min(chunk, AGAIN) if text.misses else chunk)]
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
        """Update each text after a step. Drop those that are used up or useless."""
        if not self._texts:
            return
        table = self._table
        for slot in plan.slots[self._there[plan.slots] & plan.samples].tolist():
            response = table.tokens[slot, table.prompt_length[slot] : table.length[slot]]
            if not self._texts[slot].drawn(response):
                self._drop(slot)

    def uncount(self, plan: StepPlan, checked: StepDrafts, settled: Settled) -> None:
        """Take early text out of the table's counts of drafted tokens, by which drafters are judged."""
        counts = checked.counts[plan.samples]
        own = counts > 0
        slots = plan.slots[plan.samples][own]
        if settled.accepted is not None:
            self._table.drafted[slots] -= counts[own]
            self._table.accepted[slots] -= settled.accepted[own]
        if settled.emitted is not None:  # nor are the steps that it spared
            self._table.spared_steps[slots] -= settled.emitted[own] - 1


def unchecked(plan: StepPlan, checked: StepDrafts) -> NDArray[np.bool_]:
    """[R]: requests that decode, and have no early text in this step."""
    found: NDArray[np.bool_] = (checked.counts == 0) & (plan.rows == 1) & plan.samples
    return found


def rest_of(plan: StepPlan, checked: StepDrafts) -> StepPlan | None:
    """Return the plan of the requests without checks; checks count as prompt chunks. None: all are checked."""
    places = unchecked(plan, checked)
    if not places.any():
        return None
    beside = plan.prefill_tokens + checked.drafted
    return StepPlan(plan.slots[places], plan.rows[places], plan.samples[places], prefill_tokens=beside)


def together(plan: StepPlan, checked: StepDrafts, drafts: StepDrafts | None) -> StepDrafts:
    """Early text, and the chains that were drafted for `rest_of` the plan, in one step."""
    if drafts is None:
        return checked
    places, widths = unchecked(plan, checked), (checked.tokens.shape[1], drafts.tokens.shape[1])
    counts, tokens = checked.counts.copy(), np.full((len(checked.tokens), max(widths)), -1, np.int64)
    counts[places] = drafts.counts
    tokens[:, : widths[0]] = checked.tokens
    tokens[places[plan.samples], : widths[1]] = drafts.tokens
    return StepDrafts(counts=counts, tokens=tokens, drafted=checked.drafted + drafts.drafted)
