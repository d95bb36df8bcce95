"""Early text: what an idle worker sampled of a response with older weights, checked here under the present ones.

Owns which tokens of it a step checks, and when it is given up; the acceptance law is that of drafts (`step.types`). So
it never changes a token: noise is a function of the request's key and the token's position, and what equals the
target's own draw stands. K/V and log-probs are those of the check.

Text is offered in full chunks while the response agrees with it token for token. After a difference it is still a good
draft: old and new weights draw with the same noise at the same position, so they often meet again. Few tokens of it are
offered then, first of the same positions (a token was replaced), then from where the response's last tokens stand in
it, nearest first (some were added or left out). After MISSES steps in a row without a token of it, it is dropped: that
is what hostile text costs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.plan import PromptEntry, StepPlan
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.build import StepArrays
from actors.engine.batch.step.types import Int64Array, Settled, StepDrafts

ROWS = 256  # early tokens that one step checks at most: about where a pass on a GPU leaves its memory-bound floor
LEAST = 4  # of one request: with less the pass costs more than it may bring
AGAIN = 8  # of one request at most, after a difference
_MATCH = 2  # last tokens of a response that are looked for in its text
MISSES = 4  # steps in a row that took none of its text, before it is dropped: two left-out tokens and two to look for

Reserve = Callable[[Int64Array, Int64Array], Int64Array]  # slots, counts [n]: the counts for which there is KV cache


@dataclass(slots=True)
class _Text:
    """Of one request."""

    tokens: NDArray[np.int32]
    known: int  # tokens of the response at the last look
    shift: int = 0  # token i of the response is expected to be tokens[i + shift]
    misses: int = 0  # looks in a row at which nothing of it was taken, or of which the last took a part

    def drawn(self, response: NDArray[np.int32]) -> bool:
        """The response as it is now, after a step that may have been offered some. Whether it is any good still."""
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
        """Nearest place in the text behind the last tokens of the response; where there is none it stays as it is."""
        if len(response) < _MATCH or len(self.tokens) <= _MATCH:
            return True
        windows = np.lib.stride_tricks.sliding_window_view(self.tokens[:-1], _MATCH)
        ends = np.flatnonzero((windows == response[-_MATCH:]).all(1)) + _MATCH
        if ends.size:
            self.shift = int(ends[np.abs(ends - self.known).argmin()]) - self.known
        return True


class EarlyTexts:
    """Of the requests that run. Implements `plan.SlotWatcher`."""

    def __init__(self, table: SlotTable, steps: StepArrays, vocab_size: int, rows: int = ROWS) -> None:
        self._table, self._steps, self._vocab_size, self._rows = table, steps, vocab_size, rows
        self._texts: dict[int, _Text] = {}  # by slot
        self._there = np.zeros(len(table.length), np.bool_)  # slots that have one

    def begin(self, slot: int, prompt: PromptEntry | None) -> None:
        """See SlotWatcher. What a request that comes with a prefix has already is not checked again."""
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
        """After a step: what was taken of each text. One that is used up, or of no use, is dropped."""
        if not self._texts:
            return
        table = self._table
        for slot in plan.slots[self._there[plan.slots] & plan.samples].tolist():
            response = table.tokens[slot, table.prompt_length[slot] : table.length[slot]]
            if not self._texts[slot].drawn(response):
                self._drop(slot)

    def uncount(self, plan: StepPlan, checked: StepDrafts, settled: Settled) -> None:
        """What the table counts as drafted is what drafters are judged by: early text is none of theirs."""
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
    """What drafters may draft for beside the checks, as if those were prompt chunks; None: every request is checked."""
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
