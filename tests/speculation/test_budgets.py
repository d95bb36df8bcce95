"""Budgets divide drafts among requests: what they say is kept by every drafter, and no token depends on it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from actors.engine.batch.step.build import StepArrays
from actors.engine.batch.step.types import Int64Array, StepDrafts
from actors.engine.native.engine import NativeEngine
from config.speculation import SpeculationOptions
from config.strategy import PLAIN, Strategy
from contracts.rollout import EngineWindow, Finished, StopRule
from drafter.protocol import BatchView, Drafts
from models.transformer import Transformer
from policies.speculation.build import build_budget, build_policy
from policies.speculation.length_aware import LengthAwareBudget
from policies.speculation.policy import FixedPolicy
from policies.steps import Load, StepOutcome
from tests.engine.support import DrafterBase, assert_same, drain, engine, make_requests, options_of, rollouts, run
from tests.native import needs_native
from tests.speculation.support import ENGINE, Trees, model_of, real_drafters

PROMPTS = 6
REQUESTS = make_requests(24, prompts=PROMPTS, seed=3, max_new_tokens=40)
REAL = ("ngram:4", "ngram:3x2/6", "suffix:8", "suffix:4x3/10", "eagle:3", "eagle:4x2/8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return model_of(tmp_path_factory.mktemp("budgets"), "qwen3")


@pytest.fixture(scope="module")
def expected(model: Transformer) -> dict[int, Any]:
    return run(engine(model), REQUESTS)


class BudgetBase:
    """A DraftBudget that wants to know nothing."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("begin", "end", "remember", "new_target", "save", "load"):
            raise AttributeError(name)
        return lambda *_, **__: None


class PerPrompt(BudgetBase):
    """So many tokens for each request of prompt 0, 1, ...; remembers what it is asked."""

    def __init__(self, *most: int) -> None:
        self.most = np.array(most)
        self.asked: list[tuple[Int64Array, Int64Array, Int64Array]] = []

    def budgets(
        self, load: Load, slots: Int64Array, drawn: Int64Array, room: Int64Array, strategy: Strategy
    ) -> Int64Array:
        assert not slots.flags.writeable
        assert not room.flags.writeable
        assert (drawn >= 0).all()
        assert (room >= 0).all()
        self.asked.append((load.prompt_ids.copy(), drawn.copy(), room.copy()))
        return self.most[load.prompt_ids]


class Recording(FixedPolicy):
    """Adds up what steps say they drafted and what of it stood, by prompt."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.accepted = Counter[int]()
        self.outcomes: list[StepOutcome] = []

    def record(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)
        if outcome.reached is None or outcome.stood is None or outcome.prompt_ids is None or outcome.room is None:
            return
        assert (outcome.reached <= outcome.room).all()
        assert outcome.room.shape == outcome.reached.shape
        for prompt_id, stood in zip(outcome.prompt_ids.tolist(), outcome.stood.tolist(), strict=True):
            self.accepted[prompt_id] += stood


class Seen:
    """StepArrays that note how many tokens forwards verified for each prompt: the most at once, and in all."""

    def __init__(self, steps: StepArrays, prompt_ids: Int64Array) -> None:
        self.steps, self.prompt_ids, self.most, self.drafted = steps, prompt_ids, Counter[int](), Counter[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.steps, name)

    def rows(self, plan: Any, drafts: StepDrafts | None) -> Any:
        for slot, count in zip(plan.slots, [] if drafts is None else drafts.counts, strict=drafts is not None):
            prompt_id = int(self.prompt_ids[slot])
            self.most[prompt_id] = max(self.most[prompt_id], int(count))
            self.drafted[prompt_id] += int(count)
        return self.steps.rows(plan, drafts)


def speculating(model: Transformer, expected: dict[int, Any], strategy: str, budget: Any) -> tuple[NativeEngine, Seen]:
    drafters = {**real_drafters(model), "right": Trees(expected, 0.8)}
    policy = Recording(Strategy.parse(strategy))
    core = NativeEngine(model, ENGINE, drafters=drafters, policy=policy, budget=budget)
    seen = Seen(core._steps, core._table.prompt_id)
    core._runner._steps = cast(Any, seen)
    return core, seen


@needs_native
@pytest.mark.parametrize("strategy", [*REAL, "right:6", "right:4x3/12"])
def test_no_request_drafts_above_its_budget_and_the_tokens_are_the_same(
    model: Transformer, expected: dict[int, Any], strategy: str
) -> None:
    budget = PerPrompt(0, 1, 2, 3, 99, -5)
    core, seen = speculating(model, expected, strategy, budget)
    core.remember([r.prompt_tokens for r in REQUESTS], [expected[r.request_id].tokens for r in REQUESTS])
    assert_same(run(core, REQUESTS), expected)
    assert seen.most[0] == seen.most[5] == 0
    assert (seen.most[1], seen.most[2], seen.most[3]) == (1, 2, 3)
    assert seen.most[4] > 3 or strategy == "eagle:3"
    assert isinstance(core._speculator.policy, Recording)
    assert sum(seen.drafted.values()) > sum(core._speculator.policy.accepted.values()) > 0


def test_a_drafter_that_ignores_its_room_is_cut(model: Transformer, expected: dict[int, Any]) -> None:
    class Heedless(DrafterBase):
        def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
            return Drafts(np.full((len(batch.slots), 6), 3), np.full(len(batch.slots), 6))

    core = NativeEngine(
        model,
        options_of(),
        drafters={"test": Heedless()},
        policy=FixedPolicy(Strategy.parse("test:6")),
        budget=PerPrompt(*range(PROMPTS)),
    )
    seen = Seen(core._steps, core._table.prompt_id)
    core._runner._steps = cast(Any, seen)
    assert_same(run(core, REQUESTS), expected)
    assert [seen.most[prompt_id] for prompt_id in range(PROMPTS)] == list(range(PROMPTS))


def test_without_a_budget_anywhere_the_drafter_is_not_asked(model: Transformer, expected: dict[int, Any]) -> None:
    class Unwanted(DrafterBase):
        def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
            raise AssertionError("nobody may draft")

    core = NativeEngine(
        model,
        options_of(),
        drafters={"test": Unwanted()},
        policy=FixedPolicy(Strategy.parse("test:6")),
        budget=PerPrompt(*[0] * PROMPTS),
    )
    assert_same(run(core, REQUESTS), expected)
    assert core._speculator.has_drafters


HOSTILE: dict[str, Callable[..., Any]] = {
    "raises": lambda room: 1 // 0,
    "nothing": lambda room: None,
    "one number": lambda room: 3,
    "one request too few": lambda room: room[:-1],
    "floats": lambda room: room * 1.5,
    "NaN": lambda room: np.full(len(room), np.nan),
    "objects": lambda room: np.full(len(room), None),
    "unsigned": lambda room: np.full(len(room), 2**64 - 1, np.uint64),
    "huge": lambda room: np.full(len(room), 2**62),
    "very negative": lambda room: np.full(len(room), -(2**62)),
    "a list": lambda room: [1] * len(room),
    "writes": lambda room: room.__iadd__(100),
    "small integers": lambda room: np.full(len(room), 2, np.int8),
}


USABLE = {"huge", "very negative", "a list", "small integers"}


@pytest.mark.parametrize("told", ["begin", "end", "remember", "new_target", "load"])
def test_a_budget_that_fails_at_what_it_is_told_is_given_up(
    model: Transformer, expected: dict[int, Any], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(PerPrompt):
        def __getattr__(self, name: str) -> Any:
            return (lambda *_, **__: 1 // 0) if name == told else super().__getattr__(name)

    core, _ = speculating(model, expected, "right:6", Failing(*[99] * PROMPTS))
    core.remember([], [])
    core.load_drafters(str(tmp_path))
    assert_same(run(core, REQUESTS), expected)
    assert len([record for record in caplog.records if "budget failed" in record.message]) == 1


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("strategy", ["right:6", "right:4x3/12"])
def test_a_budget_that_is_wrong_in_any_way_changes_no_token(
    model: Transformer, expected: dict[int, Any], name: str, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Hostile(BudgetBase):
        def budgets(self, load: Load, slots: Any, drawn: Any, room: Any, strategy: Strategy) -> Any:
            return HOSTILE[name](room)

    core = NativeEngine(
        model,
        options_of(),
        drafters={"right": Trees(expected, 0.8)},
        policy=FixedPolicy(Strategy.parse(strategy)),
        budget=Hostile(),
    )
    assert_same(run(core, REQUESTS), expected)
    said = [record for record in caplog.records if "budget failed" in record.message]
    assert len(said) == (name not in USABLE), "given up once, and the drafter is not blamed"
    assert core._speculator.has_drafters


def test_a_budget_is_asked_about_every_request_that_may_draft(model: Transformer, expected: dict[int, Any]) -> None:
    budget = PerPrompt(*[99] * PROMPTS)
    core, _ = speculating(model, expected, "right:6", budget)
    core.submit(REQUESTS)
    events = drain(core)
    finished = rollouts(events)
    for prompt_ids, drawn, room in budget.asked:
        assert prompt_ids.shape == drawn.shape == room.shape
        assert (drawn + room < 40).all(), "the last token is drawn, not drafted"
    assert max(int(drawn.max()) for _, drawn, _ in budget.asked) > 30
    assert finished.keys() == expected.keys()


@needs_native
@pytest.mark.parametrize("rule", [None, StopRule(give_up_at_tokens=7)], ids=["", "cut"])
@pytest.mark.parametrize("strategy", ["suffix:8", "right:4x3/12"])
def test_windows_say_what_was_drafted_for_each_prompt(
    model: Transformer, expected: dict[int, Any], strategy: str, rule: StopRule | None
) -> None:
    """It is what forwards verified, step by step, and what the strategies add up to; also where a rule takes back
    what was accepted behind a response's end."""
    budget = PerPrompt(*[99] * PROMPTS)
    core, seen = speculating(model, expected, strategy, budget)
    core.remember([r.prompt_tokens for r in REQUESTS], [expected[r.request_id].tokens for r in REQUESTS])
    core.submit([replace(request, stop=rule) for request in REQUESTS])
    events = core.step() + core.step()
    core.abort([REQUESTS[0].request_id])
    windows = [event for event in events + drain(core) if isinstance(event, EngineWindow)]
    drafted, accepted = Counter[int](), Counter[int]()
    for window in windows:
        for use in window.prompts:
            drafted[use.prompt_id] += use.drafted
            accepted[use.prompt_id] += use.accepted
    assert isinstance(core._speculator.policy, Recording)
    assert drafted == seen.drafted
    assert accepted == core._speculator.policy.accepted
    assert sum(drafted.values()) == sum(use.drafted for window in windows for use in window.strategies)
    assert sum(accepted.values()) == sum(use.accepted for window in windows for use in window.strategies) > 0


def test_a_window_holds_at_most_so_many_prompts_and_the_rest_comes_with_the_next(
    model: Transformer, expected: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.engine.batch.telemetry.MAX_PROMPTS", 2)
    budget = PerPrompt(*[99] * PROMPTS)
    core, seen = speculating(model, expected, "right:6", budget)
    core._clock = iter(np.arange(0.0, 1e6, 0.15)).__next__
    core.submit(REQUESTS)
    windows = [event for event in drain(core) if isinstance(event, EngineWindow)]
    assert max(len(window.prompts) for window in windows) == 2
    told = Counter({use.prompt_id: 0 for window in windows for use in window.prompts})
    for window in windows:
        for use in window.prompts:
            told[use.prompt_id] += use.drafted
    left = Counter({prompt_id: use[0] for prompt_id, use in core._account._meter._prompts._uses.items()})
    assert told + left == seen.drafted


def test_the_load_is_what_decodes_what_waits_and_what_attention_reads(
    tmp_path: Path, model: Transformer, expected: dict[int, Any]
) -> None:
    """Also while requests join, leave, are aborted and preempted: it is counted up, not summed at every step."""
    wrong: list[tuple[int, int]] = []

    class Counts(FixedPolicy):
        def choose(self, load: Any) -> Strategy:
            table, running = core._table, [*core._scheduler._running]
            decoding = [
                s for s in running if table.length[s] - table.computed[s] == 1 and s not in core._scheduler._held
            ]
            whole = sum(int(table.length[slot]) for slot in decoding)
            if (load.running, load.context_tokens) != (len(decoding), whole):
                wrong.append((load.context_tokens, whole))
            assert load.waiting == core._scheduler.waiting
            return super().choose(load)

    core = NativeEngine(
        model,
        options_of(max_running=6, kv_tokens=160, prefill_chunk_tokens=16),
        drafters={"right": Trees(expected, 0.8)},
        policy=Counts(Strategy.parse("right:4")),
    )
    core.submit(REQUESTS)
    for _ in range(12):
        core.step()
    core.abort([REQUESTS[1].request_id, REQUESTS[20].request_id])
    drain(core)
    assert core._scheduler.preempted > 0
    assert not wrong


class KnownCosts:
    def step_s(self, requests: int, rows: float, context_tokens: float) -> float:
        return 2e-3 + 1e-4 * rows


class KnownAcceptance:
    def survival(self, strategy: Strategy, prompt_ids: Int64Array) -> tuple[Any, Any]:
        lives = 0.7 ** np.arange(1, strategy.depth + 1)
        return np.ones((len(prompt_ids), strategy.depth)), np.tile(lives, (len(prompt_ids), 1))


def length_aware(slots: int) -> LengthAwareBudget:
    costs: Any = KnownCosts()
    acceptance: Any = KnownAcceptance()
    return LengthAwareBudget(costs, acceptance, slots)


@needs_native
@pytest.mark.parametrize("strategy", ["suffix:8", "eagle:3", "right:6", "right:4x3/12"])
def test_no_token_depends_on_budgets_by_length_also_when_requests_are_preempted_aborted_and_resumed(
    model: Transformer, expected: dict[int, Any], strategy: str, tmp_path: Path
) -> None:
    policy = Recording(Strategy.parse(strategy))
    tight = options_of(max_running=12, kv_tokens=320, prefill_chunk_tokens=16)
    core = NativeEngine(
        model,
        tight,
        drafters={**real_drafters(model), "right": Trees(expected, 0.8)},
        policy=policy,
        budget=length_aware(12),
    )
    prompts = [r.prompt_tokens for r in REQUESTS]
    for spread in (1, 3):  # of every prompt short and long responses, so that requests differ
        core.remember(prompts, [expected[r.request_id].tokens[: 40 // spread] for r in REQUESTS])
    core._speculator.new_target(0)
    core.submit([replace(r, evaluation=r.request_id % 5 == 0) for r in REQUESTS])
    for _ in range(10):
        core.step()
    held = [r for r in REQUESTS if r.request_id in core._scheduler][:4]
    core.abort([r.request_id for r in held])
    cut = {event.rollout.request_id: event.rollout for event in core.step() if isinstance(event, Finished)}
    core.submit([replace(r, prefix=cut[r.request_id].sampled if len(cut[r.request_id].tokens) else None) for r in held])
    finished = rollouts(drain(core))
    for request in held:
        assert np.array_equal(finished[request.request_id].tokens, expected[request.request_id].tokens)
    assert core._scheduler.preempted > 0
    given = [outcome.room for outcome in policy.outcomes if outcome.room is not None]
    assert strategy == "right:4x3/12" or any(len(set(room.tolist())) > 1 for room in given), "requests were unlike"
    for request_id, rollout in finished.items():
        assert np.array_equal(rollout.tokens, expected[request_id].tokens)
    assert core.save_drafters(str(tmp_path)) is None
    again = NativeEngine(model, tight, drafters=real_drafters(model), policy=None, budget=length_aware(12))
    again.load_drafters(str(tmp_path))
    budget = again._speculator._budget._budget
    assert isinstance(budget, LengthAwareBudget)
    assert budget.left(np.arange(2), np.zeros(2, np.int64), np.full(2, 30)) is not None


@needs_native
def test_with_the_adaptive_choice_budgets_divide_drafts_and_change_no_token(
    model: Transformer, expected: dict[int, Any]
) -> None:
    options = SpeculationOptions(budget="length_aware", strategies=("suffix:8", "ngram:4"), exploration=0.5)
    policy = build_policy(options, ("suffix", "ngram"))
    budget = build_budget(options, policy, 16)
    core = NativeEngine(model, options_of(max_running=16), drafters=real_drafters(model), policy=policy, budget=budget)
    for _ in range(4):
        assert_same(run(core, REQUESTS), expected)
        core._speculator.new_target(0)
    assert core._speculator._budget.active, "it did not fail"
    assert isinstance(budget, LengthAwareBudget)


def test_a_place_where_lengths_cannot_be_written_is_reported_and_costs_no_budget(
    model: Transformer, tmp_path: Path
) -> None:
    core = NativeEngine(model, options_of(), policy=FixedPolicy(PLAIN), budget=length_aware(8))
    (tmp_path / "lengths.partial").mkdir()
    failed = core.save_drafters(str(tmp_path))
    assert failed is not None
    assert failed.startswith("lengths: ")
    assert core._speculator._budget.active
