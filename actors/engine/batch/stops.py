"""Stop rules of the running requests, step by step. Owns how far each request's markers have been read; the law is
actors.engine.stopping.

The accept rule knows stop tokens and limits only. What it emitted behind the end that a rule demands is taken back
here, before anybody is told: drafts that ran past an end leave no trace in tokens, log-probs, hidden states or counts.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.plan import PromptEntry, StepPlan
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.types import Settled
from actors.engine.stopping import NOWHERE, End, Found, end_by_rule, kept, rows_of, run, table_of
from actors.engine.types import FinishReason, Marker, StopRule

Int64Array = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Reader:
    """One marker over all slots that look for it."""

    rows: Int64Array  # [vocab]
    moves: NDArray[np.uint16]  # [n + 1, S]
    state: Int64Array  # [slots]
    found: Int64Array  # [slots], as Found
    reads: NDArray[np.bool_]  # [slots]

    def read(self, table: SlotTable, slots: Int64Array, first: Int64Array, counts: Int64Array) -> None:
        """The newest counts[i] tokens of slots[i], at positions from first[i] on."""
        last = self.moves.shape[1] - 1
        for i in range(int(counts.max(initial=0))):
            some = (counts > i) & (self.found[slots] == NOWHERE)
            at, place = slots[some], first[some] + i
            state = self.moves[self.rows[table.tokens[at, place]], self.state[at]]
            self.state[at] = state
            self.found[at[state == last]] = (place - table.prompt_length[at] + 1)[state == last]


@dataclass(slots=True, eq=False)
class _Watched:
    rule: StopRule
    noise_key: int
    strings: _Reader | None
    answer: _Reader | None


@dataclass(slots=True)
class RuleStops:
    """Implements `scheduler.SlotWatcher`: a request's rule is read along from the tokens that it is admitted with."""

    table: SlotTable
    vocab_size: int
    _readers: dict[bytes, _Reader] = field(default_factory=dict)
    _watched: dict[int, _Watched] = field(default_factory=dict)  # by slot
    _due: Int64Array = field(init=False)  # [slots]: tokens with which a coin says to give up

    def __post_init__(self) -> None:
        self._due = np.full(len(self.table.length), NOWHERE, np.int64)

    def begin(self, slot: int, prompt: PromptEntry | None) -> None:
        """See SlotWatcher."""
        rule = self.table.rules[slot]
        if rule is None:
            return
        noise_key = int(self.table.noise_key[slot])
        readers = self._begin(slot, rule.strings), self._begin(slot, rule.answer)
        self._watched[slot] = _Watched(rule, noise_key, *readers)
        if rule.give_up_at_tokens is not None and not kept(rule, noise_key):
            self._due[slot] = rule.give_up_at_tokens

    def _begin(self, slot: int, marker: Marker | None) -> _Reader | None:
        if marker is None:
            return None
        reader = self._readers.get(marker.key)
        if reader is None:
            slots = len(self.table.length)
            reader = self._readers[marker.key] = _Reader(
                rows_of(marker, self.vocab_size),
                table_of(marker),
                np.zeros(slots, np.int64),
                np.full(slots, NOWHERE, np.int64),
                np.zeros(slots, np.bool_),
            )
        known = self.table.tokens[slot, self.table.prompt_length[slot] : self.table.length[slot]]
        reader.reads[slot] = True
        reader.state[slot], reader.found[slot] = run(marker, known)
        return reader

    def end(self, slot: int, finished: bool) -> None:
        """See SlotWatcher."""
        if self._watched.pop(slot, None) is None:
            return
        self._due[slot] = NOWHERE
        for key, reader in list(self._readers.items()):
            reader.reads[slot] = False
            if not reader.reads.any():
                del self._readers[key]

    def apply(self, plan: StepPlan, settled: Settled) -> Settled:
        """What the step did once the rules have been heard; shortens responses in the table."""
        if not self._watched:
            return settled
        table, slots = self.table, plan.slots[plan.samples]
        emitted = np.ones(len(slots), np.int64) if settled.emitted is None else settled.emitted
        first = table.length[slots] - emitted
        concerned = table.length[slots] - table.prompt_length[slots] >= self._due[slots]
        for reader in self._readers.values():
            reads = reader.reads[slots]
            reader.read(table, slots[reads], first[reads], emitted[reads])
            concerned |= reads & (reader.found[slots] != NOWHERE)
        # What ended by itself needs no rule to be looked at, unless its rule says so too.
        ended = dict(settled.ended)
        ends = {i: end for i in np.flatnonzero(concerned).tolist() if (end := self._end(int(slots[i]), ended))}
        if not ends:
            return settled
        kept_tokens = emitted.copy()
        for i, end in ends.items():
            slot = int(slots[i])
            ended[slot] = end.reason
            surplus = int(table.length[slot] - table.prompt_length[slot]) - end.tokens
            kept_tokens[i] -= surplus
            table.length[slot] -= surplus
            table.computed[slot] -= surplus
            table.spared_steps[slot] -= surplus
        settled = replace(
            settled,
            new_tokens=int(kept_tokens.sum()),
            ended=[(slot, ended[slot]) for slot in slots.tolist() if slot in ended],
            due=[slot for slot in settled.due if slot not in ended],
        )
        if settled.emitted is None or settled.accepted is None:
            return settled
        accepted = np.minimum(settled.accepted, kept_tokens)
        table.accepted[slots] += accepted - settled.accepted
        return replace(settled, emitted=kept_tokens, accepted=accepted, accepted_tokens=int(accepted.sum()))

    def propensity(self, slot: int, reason: FinishReason) -> float:
        """Of a response that has just ended so, in its slot."""
        if (watched := self._watched.get(slot)) is None:
            return 1.0
        tokens = self._tokens(slot)
        end = end_by_rule(watched.rule, watched.noise_key, self._found(watched, slot), tokens, End(tokens, reason))
        return 1.0 if end is None else end.propensity

    def _end(self, slot: int, ended: dict[int, FinishReason]) -> End | None:
        watched, tokens = self._watched[slot], self._tokens(slot)
        natural = End(tokens, ended[slot]) if slot in ended else None
        return end_by_rule(watched.rule, watched.noise_key, self._found(watched, slot), tokens, natural)

    def _found(self, watched: _Watched, slot: int) -> Found:
        return Found(*(NOWHERE if r is None else int(r.found[slot]) for r in (watched.strings, watched.answer)))

    def _tokens(self, slot: int) -> int:
        return int(self.table.length[slot] - self.table.prompt_length[slot])
