"""Tells the policy, the window and the listener what each engine step brought. Owns what a step's time says about the
strategy; reads no clock but the one given."""

from collections.abc import Callable
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.plan import StepPlan
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.speculation import Speculator
from actors.engine.batch.step.types import Settled, StepDrafts
from actors.engine.batch.telemetry import EngineStepRecord, Occupancy, PromptMeter, WindowMeter
from actors.engine.calibrated import PassNews
from config.strategy import PLAIN, Strategy
from contracts.rollout import EarlyUse, EngineWindow, PassEvent
from policies.speculation.policy import Reason
from policies.steps import NO_REQUESTS, Load, StepKind, StepOutcome

_NOTHING: dict[str, NDArray[np.int64]] = {}
SAMPLED = 8  # of so many plain steps one is compared with its prediction: they are short, and telemetry is a sample


class StepAccount:
    """Step times of one engine. `timer`: seconds, from anywhere. `news`: what the driver hears of the engine's
    passes."""

    def __init__(
        self,
        table: SlotTable,
        speculator: Speculator,
        prompts: PromptMeter,
        on_step: Callable[[EngineStepRecord], None] | None,
        timer: Callable[[], float] = perf_counter,
        news: PassNews | None = None,
    ) -> None:
        self._table, self._speculator, self._on_step, self._timer = table, speculator, on_step, timer
        self._meter, self._news = WindowMeter(prompts), news
        self._start_s = 0.0
        self._fresh_weights = False
        self._turn = 0
        self._plain_s: dict[int, float] = {}  # without a policy: of the last plain step, by bits of requests
        self._slots, self._evaluation = NO_REQUESTS, False  # whether those of the slots are an evaluation's

    def begin(self) -> None:
        """An engine step begins."""
        self._start_s = self._timer()

    def new_weights(self) -> None:
        """Of target or drafter: the next step's time is not the strategy's."""
        self._fresh_weights = True

    def window(self, now_s: float, occupancy: Occupancy, *, idle: bool) -> EngineWindow | None:
        """The window at hand, when it is due or nothing is left to do."""
        meter = self._meter
        return meter.cut(now_s, occupancy) if meter.due(now_s) or (idle and meter.engine_steps) else None

    def passes(self, window: EngineWindow, *, idle: bool) -> list[PassEvent]:
        """After a window that was cut: what is new of the engine's passes."""
        return [] if self._news is None else self._news.after_window(window, idle=idle)

    def checked(
        self,
        plan: StepPlan,
        load: Load,
        checked: StepDrafts,
        settled: Settled,
        occupancy: Occupancy,
        now_s: float,
    ) -> EngineWindow | None:
        """As `count`, for a step that checked early text and drafted nothing: its time tells what rows cost, and says
        nothing about a strategy."""
        elapsed_s, policy = self._timer() - self._start_s, self._speculator.policy
        ended = self._cut_between(plan, occupancy, now_s)
        self._fresh_weights = False
        if policy is not None:
            policy.record(_costs_alone(self._evaluation, PLAIN, load, plan.prefill_tokens + checked.drafted, elapsed_s))
        emitted, decoding = settled.new_tokens, load.running
        plain_s = self._plain_s.get(decoding.bit_length()) if policy is None else policy.plain_s(load)
        saved_s = 0.0 if plain_s is None or not decoding else plain_s * emitted / decoding - elapsed_s
        self._meter.count(now_s, plan.prefill_tokens, emitted, decoding, occupancy.running, PLAIN, 0.0)
        self._meter.count_early(
            EarlyUse(
                engine_steps=1,
                checked=checked.drafted,
                stood=settled.accepted_tokens,
                seconds=elapsed_s,
                saved_s=saved_s,
            )
        )
        if self._on_step is not None:
            record = EngineStepRecord(
                at_s=now_s,
                running=decoding,
                context_tokens=load.context_tokens,
                strategy=PLAIN,
                drafted=0,
                accepted=0,
                emitted=emitted,
                elapsed_s=elapsed_s,
                draft_s=0.0,
                prefill_tokens=plan.prefill_tokens,
                checked=checked.drafted,
            )
            self._on_step(record)
        return ended

    def _cut_between(self, plan: StepPlan, occupancy: Occupancy, now_s: float) -> EngineWindow | None:
        """The window that ends because the step at hand is an evaluation's and those before were not, or the other way
        round."""
        if plan.slots is not self._slots:  # the same array while it is the same requests
            self._slots, self._evaluation = plan.slots, bool(self._table.evaluation[plan.slots].any())
        meter = self._meter
        ended = meter.cut(now_s, occupancy) if meter.engine_steps and meter.evaluation != self._evaluation else None
        meter.evaluation = self._evaluation
        return ended

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
    ) -> EngineWindow | None:
        """A step that began at now_s (clock) and at `begin` (timer). `undisturbed`: nothing but decoding and drafting
        took its time. Returns the window that it ended: no window has steps of an evaluation beside others."""
        speculator, meter, policy, decoding = self._speculator, self._meter, self._speculator.policy, load.running
        drafted, emitted = 0 if drafts is None else drafts.drafted, settled.new_tokens
        elapsed_s = self._timer() - self._start_s
        typical = undisturbed and not (plan.prefill_tokens or self._fresh_weights)
        self._fresh_weights = False
        ended = self._cut_between(plan, occupancy, now_s)
        evaluation = self._evaluation
        expected_s: float | None = None
        reason: Reason | None = None
        if policy is not None and decoding:
            by_request = _NOTHING  # A plain step of a small model takes 100 us: nothing is built for it in vain.
            if drafts is not None or speculator.room is not None:
                by_request = _by_request(plan, self._table, drafts, settled, speculator.room)
            outcome = StepOutcome(
                kind=_kind(evaluation, typical, speculator.caught_up),
                strategy=strategy,
                load=load,
                prompt_tokens=plan.prefill_tokens,
                drafted=drafted,
                # An accepted token that ends its response is followed by none of the target's own:
                # `accepted_tokens` would count it beside the one that every request gets, also at its prompt's end.
                accepted=emitted - (int(plan.samples.sum()) if plan.prefill_tokens else decoding),
                elapsed_s=elapsed_s,
                draft_s=speculator.draft_s,
                **by_request,
            )
            reason = policy.reason  # and what it expected: before it learns of this step
            self._turn += 1
            if strategy.depth or not self._turn % SAMPLED:
                expected_s = policy.expected_s(outcome)
            policy.record(outcome)
        elif policy is not None and plan.prefill_tokens:  # its time tells what many rows cost
            policy.record(_costs_alone(evaluation, strategy, load, plan.prefill_tokens, elapsed_s))
        timed_s = elapsed_s if typical else 0.0
        if policy is None and typical:  # what early text will be compared with
            self._plain_s[decoding.bit_length()] = elapsed_s
        meter.count(now_s, plan.prefill_tokens, emitted, decoding, occupancy.running, strategy, timed_s)
        if policy is not None and reason is not None:
            meter.count_choice(reason, policy.advantage if reason is Reason.PLAIN_IS_FASTER else None)
            if expected_s is not None and typical:
                meter.count_expected(expected_s, elapsed_s)
        if strategy.depth and policy is not None:
            plain_s = policy.plain_s(load) if typical else None
            saved_s = most_s = 0.0
            if plain_s is not None:  # a verification takes no less time than a plain step of the same requests
                saved_s, most_s = plain_s * emitted / decoding - elapsed_s, elapsed_s * (emitted / decoding - 1)
            draft_s = speculator.draft_s if typical else 0.0
            meter.count_drafting(drafted, settled.accepted_tokens, draft_s, saved_s, most_s)
            if drafts is not None and settled.accepted is not None:
                meter.count_depths(drafts.reached, settled.accepted)
        if self._on_step is not None:
            record = EngineStepRecord(
                at_s=now_s,
                running=decoding,
                context_tokens=load.context_tokens,
                strategy=strategy,
                drafted=drafted,
                accepted=settled.accepted_tokens,
                emitted=emitted,
                elapsed_s=elapsed_s,
                draft_s=speculator.draft_s,
                prefill_tokens=plan.prefill_tokens,
                expected_s=expected_s,
                reason=reason,
            )
            self._on_step(record)
        return ended


def _kind(evaluation: bool, typical: bool, caught_up: bool) -> StepKind:
    if evaluation:
        return StepKind.EVALUATION
    if not typical:
        return StepKind.DISTURBED
    return StepKind.CAUGHT_UP if caught_up else StepKind.USUAL


def _costs_alone(evaluation: bool, strategy: Strategy, load: Load, prompt_tokens: int, elapsed_s: float) -> StepOutcome:
    """Of a step that tells what its rows cost, and nothing about a strategy."""
    return StepOutcome(
        kind=_kind(evaluation, False, False),
        strategy=strategy,
        load=load,
        prompt_tokens=prompt_tokens,
        drafted=0,
        accepted=0,
        elapsed_s=elapsed_s,
        draft_s=0.0,
    )


def _by_request(
    plan: StepPlan,
    table: SlotTable,
    drafts: StepDrafts | None,
    settled: Settled,
    room: NDArray[np.int64] | None,
) -> dict[str, NDArray[np.int64]]:
    """The arrays of a StepOutcome; nothing where nothing was drafted but by a budget."""
    found: dict[str, NDArray[np.int64]] = {}
    if plan.prefill_tokens:  # those that end their prompt were not asked for drafts
        allowed = np.zeros(len(plan.slots), np.int64)
        allowed[(plan.rows == 1) & plan.samples] = table.tokens.shape[1] if room is None else room
        room = allowed[plan.samples]
    if room is not None:
        found["room"] = room
    if drafts is None or settled.accepted is None:
        return found
    slots, reached = plan.slots, drafts.reached
    if plan.prefill_tokens:  # and a chain: requests that drew nothing have no draft
        slots, reached = slots[plan.samples], reached[plan.samples]
    return found | {"prompt_ids": table.prompt_id[slots], "reached": reached, "stood": settled.accepted}
