"""Stop rules of the running requests, step by step. Owns what a step becomes when a rule ends a response in it; whom a
rule ends is found by actors.engine.batch.markers, and the law is actors.engine.stopping.

The accept rule knows stop tokens and limits only. What it emitted behind the end that a rule demands is taken back
here, before anybody is told: drafts that ran past an end leave no trace in tokens, log-probs, hidden states or counts.
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
    """Implements `scheduler.SlotWatcher`: a request's rule is read along from the tokens that it is admitted with."""

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
        """What the step did once the rules have been heard; shortens responses in the table."""
        found = self._look()
        return settled if found is None else self._cut(found, plan, settled)

    def _cut(self, found: list[int], plan: StepPlan, settled: Settled) -> Settled:
        """`found`: slots that their rules end, in any order."""
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
        """Of a response that has just ended so, in its slot."""
        rule = self._table.rules[slot]
        limit = None if rule is None else rule.give_up_at_tokens
        if limit is None or (self._tokens(slot) <= limit and reason is not FinishReason.GIVEN_UP):
            return 1.0  # its coin was not asked
        end = self._end(slot, {slot: reason})
        return 1.0 if end is None else end.propensity

    def _end(self, slot: int, ended: dict[int, FinishReason]) -> End | None:
        """By itself, as `ended` says, or by its rule."""
        rule, tokens = self._table.rules[slot], self._tokens(slot)
        assert rule is not None
        natural = End(tokens, ended[slot]) if slot in ended else None
        return end_by_rule(rule, int(self._table.noise_key[slot]), self._reader.found(slot), tokens, natural)

    def _tokens(self, slot: int) -> int:
        return int(self._table.length[slot] - self._table.prompt_length[slot])
