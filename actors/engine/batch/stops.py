"""Apply stop rules to the running requests after each step. actors.engine.batch.markers finds the requests that a rule
may end; actors.engine.stopping defines the rules.

The accept rule only handles stop tokens and limits. Tokens emitted behind a rule's end are removed here before any
report. Drafts past an end thus leave no trace in tokens, log-probs, hidden states or counts.
"""

from dataclasses import replace

import numpy as np

from actors.engine.batch.markers import stop_reader
from actors.engine.batch.plan import PromptEntry, StepPlan
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.types import Settled
from actors.engine.stopping import End, end_by_rule
from contracts.rollout import FinishReason


class RuleStops:
    """Implements `scheduler.SlotWatcher`. A request's rule is read from its first token on."""

    def __init__(self, table: SlotTable, vocab_size: int) -> None:
        self._table, self._reader = table, stop_reader(table, vocab_size)
        self._look = self._reader.look
        self._watched: set[int] = set()  # slots

    def begin(self, slot: int, prompt: PromptEntry | None) -> None:
        """See SlotWatcher."""
        rule = self._table.rules[slot]
        if rule is None:
            return
        self._reader.begin(slot, rule)
        self._watched.add(slot)

    def end(self, slot: int, finished: bool) -> None:
        """See SlotWatcher."""
        if slot in self._watched:
            self._watched.discard(slot)
            self._reader.end(slot)

    def apply(self, plan: StepPlan, settled: Settled) -> Settled:
        """Return the step's result after the rules; shortens responses in the table."""
        found = self._look()
        return settled if found is None else self._cut(found, plan, settled)

    def _cut(self, found: list[int], plan: StepPlan, settled: Settled) -> Settled:
        """`found`: slots that their rules may end, in any order."""
        table, ended = self._table, dict(settled.ended)
        surplus: dict[int, int] = {}
        for slot in found:
            end = self._end(slot, ended)
            if end is None:
                self._reader.spare(slot)
                continue
            ended[slot] = end.reason
            if more := self._tokens(slot) - end.tokens:
                surplus[slot] = more
                table.length[slot] -= more
                table.computed[slot] -= more
                table.spared_steps[slot] -= more
        slots = plan.slots[plan.samples]
        settled = replace(
            settled,
            new_tokens=settled.new_tokens - sum(surplus.values()),
            ended=[(slot, ended[slot]) for slot in slots.tolist() if slot in ended],
            due=[slot for slot in settled.due if slot not in ended],
        )
        if not surplus or settled.emitted is None or settled.accepted is None:
            return settled
        kept_tokens = settled.emitted - np.array([surplus.get(slot, 0) for slot in slots.tolist()])
        accepted = np.minimum(settled.accepted, kept_tokens)
        table.accepted[slots] += accepted - settled.accepted
        return replace(settled, emitted=kept_tokens, accepted=accepted, accepted_tokens=int(accepted.sum()))

    def propensity(self, slot: int, reason: FinishReason) -> float:
        """Return the propensity of a response that has just ended for this reason, in its slot."""
        rule = self._table.rules[slot]
        limit = None if rule is None else rule.give_up_at_tokens
        if limit is None or (self._tokens(slot) <= limit and reason is not FinishReason.GIVEN_UP):
            return 1.0  # it ended before its give-up limit
        end = self._end(slot, {slot: reason})
        return 1.0 if end is None else end.propensity

    def _end(self, slot: int, ended: dict[int, FinishReason]) -> End | None:
        """Return the end by itself, as in `ended`, or by its rule."""
        rule, tokens = self._table.rules[slot], self._tokens(slot)
        assert rule is not None
        natural = End(tokens, ended[slot]) if slot in ended else None
        return end_by_rule(rule, int(self._table.noise_key[slot]), self._reader.found(slot), tokens, natural)

    def _tokens(self, slot: int) -> int:
        return int(self._table.length[slot] - self._table.prompt_length[slot])
