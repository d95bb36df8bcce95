"""Report each engine step to the policy, the telemetry window and the listener. Decides what a step's time says about
its strategy; the only clock is the given one."""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.early import rest_of, unchecked
from actors.engine.batch.plan import StepPlan
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.speculation import Speculator
from actors.engine.batch.step.types import Settled, StepDrafts
from actors.engine.batch.telemetry import EngineStepRecord, Occupancy, PromptMeter, WindowMeter
from actors.engine.calibrated import PassNews
from config.strategy import PLAIN, Strategy
from contracts.rollout import EarlyUse, EngineWindow, PassEvent
from policies.speculation.policy import Reason, StrategyPolicy
from policies.speculation.savings import Savings
from policies.steps import NO_REQUESTS, Load, StepKind, StepOutcome

_NOTHING: dict[str, Any] = {}
LIKE = 8  # steps of a number of requests over which what a token takes is averaged
SAMPLED = 8  # of so many plain steps one is compared with its prediction: they are short, and telemetry is a sample


class StepAccount:
    """Step times of one engine. `steps`: receives a record of each. `timer`: seconds, from any origin. `news`: the
    driver's reports about the engine's passes."""

    def __init__(
        self,
        table: SlotTable,
        speculator: Speculator,
        prompts: PromptMeter,
        savings: Savings,
        steps: list[EngineStepRecord] | None,
        timer: Callable[[], float] = perf_counter,
        news: PassNews | None = None,
    ) -> None:
        self._table, self._speculator, self._steps, self._timer = table, speculator, steps, timer
        self._meter, self._news, self._savings = WindowMeter(prompts), news, savings
        self._start_s = 0.0
        self._fresh_weights = False
        self._turn = 0
        self._token_s: dict[int, float] = {}  # a token of every request, drafts included, by bits of their number
        self._slots, self._evaluation = NO_REQUESTS, False  # whether those of the slots are an evaluation's

    def begin(self) -> None:
        """Start timing an engine step."""
        self._start_s = self._timer()

    def new_weights(self) -> None:
        """Target or drafter weights are new: the next step's time does not count for the strategy."""
        self._fresh_weights = True
        self._settle()  # an engine that is never idle

    def window(self, now_s: float, occupancy: Occupancy, *, idle: bool) -> EngineWindow | None:
        """Return the current window, if it is due or no work is left."""
        meter = self._meter
        if idle:
            self._settle()
        return self._cut(now_s, occupancy) if meter.due(now_s) or (idle and meter.engine_steps) else None

    def _cut(self, now_s: float, occupancy: Occupancy) -> EngineWindow:
        speculator = self._speculator
        window = self._meter.cut(now_s, occupancy)
        heard_tokens, heard_delay_s = speculator.take_heard()
        return replace(
            window,
            origins=tuple(speculator.accepted_from().items()),
            sibling_gain=speculator.sibling_gain(),
            heard_tokens=heard_tokens,
            heard_delay_s=heard_delay_s,
        )

    def passes(self, window: EngineWindow, *, idle: bool) -> list[PassEvent]:
        """Return the news about the engine's passes. Call it after a window was cut."""
        return [] if self._news is None else self._news.after_window(window, idle=idle)

    def _cut_between(self, plan: StepPlan, occupancy: Occupancy, now_s: float) -> EngineWindow | None:
        """Return the window that ends because this step switches between evaluation and training rollouts."""
        if plan.slots is not self._slots:  # the same array while the requests are the same
            self._slots, self._evaluation = plan.slots, bool(self._table.evaluation[plan.slots].any())
        meter = self._meter
        ended = None
        if meter.engine_steps and meter.evaluation != self._evaluation:
            self._settle()
            ended = self._cut(now_s, occupancy)
        meter.evaluation = self._evaluation
        return ended

    def _settle(self) -> None:
        """Correct what was booked as saved by what plain decoding of the same responses takes."""
        policy = self._speculator.policy

        def price(running: int, context_tokens: int) -> float | None:
            return None if policy is None else policy.plain_s(Load(running, 0, context_tokens))

        if self._meter.engine_steps:  # else no window shows it: with the next one
            rest = None if self._meter.evaluation else self._speculator.rest
            for strategy, seconds in self._savings.settle(price).items():
                self._meter.count_correction(strategy, seconds)
                if rest is not None:
                    rest.corrected(seconds)
            if rest is not None:
                rest.ended()

    def count(
        self,
        plan: StepPlan,
        strategy: Strategy,
        load: Load,
        drafts: StepDrafts | None,
        settled: Settled,
        occupancy: Occupancy,
        now_s: float,
        *,
        undisturbed: bool,
        captured: bool = False,
        checked: StepDrafts | None = None,
    ) -> EngineWindow | None:
        """A step that began at now_s (clock) and at `begin` (timer). `undisturbed`: nothing but decoding and drafting
        took its time. `captured`: a graph's capture did. `checked`: early text that it checked beside `drafts` of the
        other requests; its time then tells what rows cost, and nothing about a strategy. Returns the window that it
        ended: no window has steps of an evaluation beside others."""
        speculator, meter, policy, decoding = self._speculator, self._meter, self._speculator.policy, load.running
        drafted, emitted = 0 if drafts is None else drafts.drafted, settled.new_tokens
        elapsed_s = self._timer() - self._start_s
        typical = undisturbed and checked is None and not (captured or plan.prefill_tokens or self._fresh_weights)
        self._fresh_weights = False
        rests = speculator.rests  # when the strategy was chosen
        ended = self._cut_between(plan, occupancy, now_s)
        evaluation = self._evaluation
        expected_s: float | None = None
        reason: Reason | None = None
        accepted, stood = settled.accepted_tokens, settled.accepted  # of drafts
        saved_s = most_s = 0.0
        if checked is not None:
            stood, saved_s, most_s = self._checked(
                policy, plan, strategy, load, drafts, settled, checked, elapsed_s, captured=captured
            )
            accepted = 0 if stood is None else int(stood.sum())
        elif policy is not None and decoding and rests:
            reason = Reason.RESTS
            self._turn += 1
            if not self._turn % SAMPLED:  # so that the price of plain steps is known after the rest
                kind = _kind(evaluation, typical, False)
                policy.record(_without_drafts(kind, load, plan.prefill_tokens, elapsed_s, alike=SAMPLED))
            self._judge(reason, elapsed_s, 0.0, 0.0)
        elif policy is not None and decoding:
            by_request = _NOTHING  # A plain step of a small model takes 100 us: nothing is built for it in vain.
            if drafts is not None or speculator.room is not None:
                by_request = _by_request(plan, self._table, drafts, settled, speculator.room, speculator.chosen_slots)
            outcome = StepOutcome(
                kind=_kind(evaluation, typical, speculator.caught_up),
                strategy=strategy,
                load=load,
                prompt_tokens=plan.prefill_tokens,
                drafted=drafted,
                # If an accepted token ends its response, no draw of the target follows. `accepted_tokens` would count
                # that token in addition to the one that every request gets, also at its prompt's end.
                accepted=emitted - (int(plan.samples.sum()) if plan.prefill_tokens else decoding),
                elapsed_s=elapsed_s,
                draft_s=speculator.draft_s,
                **by_request,
            )
            reason = policy.reason  # and its expectation, before it learns from this step
            self._turn += 1
            if strategy.depth or not self._turn % SAMPLED:
                expected_s = policy.expected_s(outcome)
            if strategy.depth:
                saved_s, most_s = self._savings.book(outcome, policy, usual=typical, captured=captured)
            else:
                self._savings.passed(load)
            policy.record(outcome)
            if speculator.rest is not None:
                chose_s = speculator.chose_s
                # A usual step's own seconds have those of choosing: what drafts saved is what is left beside them.
                apart_s = chose_s if strategy.depth and typical else 0.0
                chose_s += self._timer() - self._start_s - elapsed_s
                self._judge(reason, elapsed_s, saved_s + apart_s, chose_s)
        elif policy is not None and plan.prefill_tokens:  # its time shows the cost of many rows
            kind = _kind(evaluation, False, False)
            policy.record(_without_drafts(kind, load, plan.prefill_tokens, elapsed_s))
        timed_s = elapsed_s if typical else 0.0
        if typical and emitted:  # what early text will be compared with
            bits, token_s = decoding.bit_length(), elapsed_s * decoding / emitted
            before_s = self._token_s.get(bits, token_s)
            self._token_s[bits] = before_s + (token_s - before_s) / LIKE
        meter.count(now_s, plan.prefill_tokens, emitted, decoding, occupancy.running, strategy, timed_s)
        if policy is not None and reason is not None:
            meter.count_choice(reason, policy.advantage if reason is Reason.PLAIN_IS_FASTER else None)
            if expected_s is not None and typical:
                meter.count_expected(expected_s, elapsed_s)
        if strategy.depth and policy is not None:
            draft_s = speculator.draft_s if typical else 0.0
            meter.count_drafting(drafted, accepted, draft_s, saved_s, most_s)
            if drafts is not None and stood is not None:
                meter.count_depths(drafts.reached, stood)
        if self._steps is not None:
            record = EngineStepRecord(
                at_s=now_s,
                running=decoding,
                context_tokens=load.context_tokens,
                strategy=strategy,
                drafted=drafted,
                accepted=accepted,
                emitted=emitted,
                elapsed_s=elapsed_s,
                draft_s=speculator.draft_s,
                prefill_tokens=plan.prefill_tokens,
                expected_s=expected_s,
                reason=reason,
                checked=0 if checked is None else checked.drafted,
            )
            self._steps.append(record)
        return ended

    def _judge(self, reason: Reason, elapsed_s: float, saved_s: float, chose_s: float) -> None:
        """Tell `Rest` of a step of a training rollout in which something could be chosen."""
        rest = self._speculator.rest
        if rest is not None and not self._evaluation and reason not in (Reason.TOO_MANY, Reason.NO_DRAFTER):
            rest.decoded(elapsed_s, saved_s, chose_s)

    def _checked(
        self,
        policy: StrategyPolicy | None,
        plan: StepPlan,
        strategy: Strategy,
        load: Load,
        drafts: StepDrafts | None,
        settled: Settled,
        checked: StepDrafts,
        elapsed_s: float,
        *,
        captured: bool,
    ) -> tuple[NDArray[np.int64] | None, float, float]:
        """Account for the checks' gain, and tell the policy of the drafts in the same step.

        Returns how many of each request's drafts were accepted (None: there were no drafts), and the seconds that they
        saved, and at most could have (`Savings.beside`)."""
        speculator, stood = self._speculator, None
        saved_s = most_s = 0.0
        # A capture's seconds show no row's cost, which policies learn from steps with rows beside decoding.
        beside = 0 if captured else plan.prefill_tokens + checked.drafted
        target_s = elapsed_s - speculator.draft_s  # a drafter that offered nothing took time all the same
        outcome = _without_drafts(_kind(self._evaluation, False, False), load, beside, target_s)
        rest = rest_of(plan, checked)
        if drafts is not None and rest is not None and settled.accepted is not None:
            stood = settled.accepted[unchecked(plan, checked)[plan.samples]]
            own = speculator.chosen_for
            outcome = StepOutcome(
                kind=_kind(self._evaluation, False, False),
                strategy=strategy,
                load=own,
                # The rows of whoever is checked are to drafts what those of prompts are.
                prompt_tokens=beside + load.running - own.running if beside else 0,
                drafted=drafts.drafted,
                accepted=int(stood.sum()),
                elapsed_s=elapsed_s,
                draft_s=speculator.draft_s,
                prompt_ids=self._table.prompt_id[rest.slots],
                reached=drafts.reached,
                stood=stood,
                room=speculator.room,
            )
        if policy is not None:
            policy.record(outcome)
            if stood is not None:
                whole = replace(outcome, load=load, prompt_tokens=beside)
                saved_s, most_s = self._savings.beside(whole, policy, captured=captured)
        decoding, ends = load.running, int(plan.samples.sum()) - load.running  # ends: of prompts, which draw a token
        self._savings.passed(load, settled.new_tokens - ends - decoding)
        token_s = self._token_s.get(decoding.bit_length())
        if token_s is None and policy is not None:
            token_s = policy.plain_s(load)
        own_s = 0.0 if captured else elapsed_s
        if plan.prefill_tokens:  # prompts have their rows' part of what the step took beyond decoding
            own_s -= max(own_s - (token_s or 0.0), 0.0) * plan.prefill_tokens / (plan.prefill_tokens + checked.drafted)
        decoded_s = 0.0 if token_s is None or captured else token_s * (settled.new_tokens - ends) / decoding
        self._meter.count_early(
            EarlyUse(
                engine_steps=1,
                checked=checked.drafted,
                stood=settled.accepted_tokens - (0 if stood is None else int(stood.sum())),
                seconds=own_s,
                saved_s=decoded_s - own_s if decoded_s else 0.0,
            )
        )
        return stood, saved_s, most_s


def _kind(evaluation: bool, typical: bool, caught_up: bool) -> StepKind:
    if evaluation:
        return StepKind.EVALUATION
    if not typical:
        return StepKind.DISTURBED
    return StepKind.CAUGHT_UP if caught_up else StepKind.USUAL


def _without_drafts(kind: StepKind, load: Load, prompt_tokens: int, elapsed_s: float, *, alike: int = 1) -> StepOutcome:
    """The outcome of a step that says what its rows cost, and nothing about a drafter."""
    return StepOutcome(
        kind=kind,
        strategy=PLAIN,
        load=load,
        prompt_tokens=prompt_tokens,
        drafted=0,
        accepted=0,
        elapsed_s=elapsed_s,
        draft_s=0.0,
        alike=alike,
    )


def _by_request(
    plan: StepPlan,
    table: SlotTable,
    drafts: StepDrafts | None,
    settled: Settled,
    room: NDArray[np.int64] | None,
    decoding: NDArray[np.int64],
) -> dict[str, Any]:
    """Return the per-request arrays of a StepOutcome; nothing if nothing was drafted and there was no budget.

    `room`: draft limits of `decoding`, the slots that the strategy was chosen for. On vLLM the step may have others: a
    prompt that ends with one row looks like decoding, and a request may be preempted after the choice."""
    found: dict[str, NDArray[np.int64]] = {}
    if plan.prefill_tokens or (room is not None and decoding is not plan.slots):
        allowed = np.zeros(len(table.length), np.int64)  # requests that end their prompt in this step could not draft
        allowed[decoding] = table.tokens.shape[1] if room is None else room
        room = allowed[plan.slots[plan.samples]]
    if room is not None:
        found["room"] = room
    if drafts is None or settled.accepted is None:
        return found
    slots, reached = plan.slots, drafts.reached
    if plan.prefill_tokens:  # a chain: requests without a draw have no draft
        slots, reached = slots[plan.samples], reached[plan.samples]
    return found | {"prompt_ids": table.prompt_id[slots], "reached": reached, "stood": settled.accepted}
