"""Windows add up to the steps they hold, per strategy and depth; savings follow from the policy's plain cost."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest

from actors.engine.batch.telemetry import TRACE_S, EngineStepRecord
from actors.engine.native.engine import NativeEngine
from config.strategy import PLAIN, Strategy
from contracts.rollout import EngineWindow, StrategyUse
from drafter.protocol import BatchView, Drafts
from models import weights
from models.checkpoint import hf_state_dict
from policies.speculation.policy import FixedPolicy, Reason
from policies.steps import Load, StepKind, StepOutcome
from tests.engine.support import drain, engine, make_requests, options_of, run, tiny_model
from tests.engine.test_speculation import Oracle
from tests.engine.test_trees import RandomTrees


class Turns(FixedPolicy):
    """Takes turns; knows what plain decoding costs; remembers what it is told."""

    def __init__(self, strategies: list[Strategy], plain_s: float | None) -> None:
        super().__init__(max(strategies, key=lambda s: s.tokens_to_verify))
        self.strategies, self.cost_s, self.step = strategies, plain_s, 0
        self.recorded: list[tuple[Strategy, int, int, int, float]] = []
        self.skipped: list[tuple[Strategy, int, float]] = []

    def choose(self, load: Load) -> Strategy:
        self.step += 1
        return self.strategies[self.step % len(self.strategies)]

    def record(self, outcome: StepOutcome) -> None:
        strategy, running, elapsed_s = outcome.strategy, outcome.load.running, outcome.elapsed_s
        if outcome.kind is StepKind.USUAL:
            self.recorded.append((strategy, running, outcome.drafted, outcome.accepted, elapsed_s))
        else:
            self.skipped.append((strategy, running, elapsed_s))

    def plain_s(self, load: Load) -> float | None:
        return None if self.cost_s is None else self.cost_s * load.running

    @property
    def reason(self) -> Reason:
        return Reason.PAYS_MOST if self.strategies[self.step % len(self.strategies)].depth else Reason.PLAIN_IS_FASTER

    @property
    def advantage(self) -> float | None:
        return 0.75

    def expected_s(self, outcome: StepOutcome) -> float | None:
        """Nothing of steps with an odd number of requests."""
        return 1e-4 * outcome.rows if outcome.load.running % 2 == 0 else None


@pytest.mark.parametrize("plain_s", [None, 1e-7, 0.5])
def test_windows_are_the_sum_of_their_steps(tmp_path: Path, plain_s: float | None) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(20, prompts=6, seed=31, max_new_tokens=30)
    expected = run(engine(model), requests)
    chain, tree = Strategy("oracle", 4), Strategy("tree", 3, 2, 6)
    policy, records = Turns([PLAIN, chain, tree], plain_s), list[EngineStepRecord]()
    drafters = {"oracle": Oracle(expected, spoil=True), "tree": RandomTrees(expected, 0.6)}
    core = NativeEngine(model, options_of(), drafters=drafters, policy=policy, steps=records)
    core.submit(requests)
    windows = [event for event in drain(core) if isinstance(event, EngineWindow)]

    total: dict[str, list[StrategyUse]] = defaultdict(list)
    for window in windows:
        assert sum(use.engine_steps for use in window.strategies) == window.engine_steps
        for use in window.strategies:
            total[use.strategy].append(use)
    assert sum(window.engine_steps for window in windows) == len(records)
    assert sum(window.decode_tokens for window in windows) == sum(record.emitted for record in records) == 20 * 30
    assert sum(window.prefill_tokens for window in windows) == sum(record.prefill_tokens for record in records)
    for strategy in (PLAIN, chain, tree):
        uses, mine = total[str(strategy)], [record for record in records if record.strategy == strategy]
        timed = [step for step in policy.recorded if step[0] == strategy]
        assert sum(use.engine_steps for use in uses) == len(mine)
        assert sum(use.request_steps for use in uses) == sum(record.running for record in mine)
        assert sum(use.drafted for use in uses) == sum(record.drafted for record in mine)
        assert sum(use.accepted for use in uses) == sum(record.accepted for record in mine)
        assert sum(use.seconds for use in uses) == pytest.approx(sum(step[-1] for step in timed))
        for use in uses:
            assert len(use.offered) == len(use.taken) == strategy.depth
            assert all(a >= b for a, b in pairwise(use.offered))
            assert all(taken <= offered for taken, offered in zip(use.taken, use.offered, strict=True))
            assert sum(use.taken) == use.accepted
            assert sum(use.offered) == use.drafted or strategy is tree
            assert 0 <= use.draft_s <= use.seconds or strategy is PLAIN
        # Emitted tokens of a step are worth plain_s(running) / running each, but no more than they took; here all do.
        emitted = [record.emitted for record in mine if not record.prefill_tokens and record.strategy.depth]
        most = [(r.emitted / r.running - 1) * r.elapsed_s for r in mine if not r.prefill_tokens and r.running]
        saved_s = sum(use.saved_s for use in uses)
        if plain_s is None or strategy is PLAIN:
            assert saved_s == 0
        elif len(emitted) == len(timed):  # No step of copies among them.
            expected_s = plain_s * sum(emitted) - sum(step[-1] for step in timed)
            assert saved_s == pytest.approx(sum(most) if plain_s == 0.5 else expected_s)
    assert len(policy.recorded) + len(policy.skipped) == len(records), "prompts alone among them"
    assert {strategy for strategy, *_ in policy.recorded} == {PLAIN, chain, tree}


def test_windows_add_up_predictions_and_reasons_of_their_steps(tmp_path: Path) -> None:
    """Of what was predicted, timed and chosen for: by strategy and by reason, nothing twice and nothing lost."""
    model = tiny_model(tmp_path)
    requests = make_requests(20, prompts=6, seed=31, max_new_tokens=30)
    expected = run(engine(model), requests)
    chain = Strategy("oracle", 4)
    policy, records = Turns([PLAIN, chain], 0.5), list[EngineStepRecord]()
    drafters = {"oracle": Oracle(expected, spoil=True)}
    core = NativeEngine(model, options_of(), drafters=drafters, policy=policy, steps=records)
    core.submit(requests)
    windows = [event for event in drain(core) if isinstance(event, EngineWindow)]
    timed_s = {id(step): step[-1] for step in policy.recorded}.values()
    for strategy in (PLAIN, chain):
        uses = [use for window in windows for use in window.strategies if use.strategy == str(strategy)]
        mine = [r for r in records if r.strategy == strategy and r.expected_s is not None and r.elapsed_s in timed_s]
        assert sum(use.expected_s for use in uses) == pytest.approx(sum(r.expected_s or 0.0 for r in mine)) != 0
        assert sum(use.measured_s for use in uses) == pytest.approx(sum(r.elapsed_s for r in mine))
        missed = [abs(r.elapsed_s - (r.expected_s or 0.0)) for r in mine]
        assert sum(use.missed_s for use in uses) == pytest.approx(sum(missed))
        assert all(use.measured_s <= use.seconds for use in uses)
    counts: Counter[str] = Counter()
    for window in windows:
        counts.update({use.reason: use.engine_steps for use in window.reasons})
        assert sum(use.engine_steps for use in window.reasons) <= window.engine_steps
    assert counts == Counter(str(record.reason) for record in records if record.reason is not None)
    assert sum(counts.values()) == sum(record.running > 0 for record in records)
    assert set(counts) == {"pays most", "plain is faster"}
    for use in (use for window in windows for use in window.reasons):
        judged = use.engine_steps if use.reason == "plain is faster" else 0  # how much slower drafts would have been
        assert (use.judged, use.advantage) == (judged, 0.75 * judged)


def test_an_accepted_stop_token_is_not_counted_twice(tmp_path: Path) -> None:
    """It is the one token of its request in that step: short responses made drafters look 2 to 5 % better."""
    model = tiny_model(tmp_path)
    free = run(engine(model), make_requests(8, prompts=4, seed=31, max_new_tokens=30))
    requests = [
        replace(request, sampling=replace(request.sampling, stop_token_ids=(int(free[request.request_id].tokens[9]),)))
        for request in make_requests(8, prompts=4, seed=31, max_new_tokens=30)
    ]
    expected = run(engine(model), requests)
    assert all(len(rollout.tokens) <= 10 for rollout in expected.values())
    policy, records = Turns([Strategy("oracle", 4)], None), list[EngineStepRecord]()
    drafters = {"oracle": Oracle(expected)}
    core = NativeEngine(model, options_of(), drafters=drafters, policy=policy, steps=records)
    core.submit(requests)
    drain(core)
    timed = [record for record in records if record.running and not record.prefill_tokens]
    assert sum(record.accepted + record.running for record in timed) > sum(record.emitted for record in timed)
    told = sum(running + accepted for _, running, _, accepted, _ in policy.recorded)
    assert told == sum(record.emitted for record in timed[-len(policy.recorded) :])


def test_steps_that_say_nothing_about_a_strategy_are_skipped(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    policy, records = Turns([PLAIN], None), list[EngineStepRecord]()
    core = NativeEngine(model, options_of(), policy=policy, steps=records)
    first, second = make_requests(2, seed=32, max_new_tokens=30)
    core.submit([first])
    for _ in range(5):
        core.step()
    assert (len(policy.recorded), len(policy.skipped)) == (4, 1), "the prompt"
    core.submit([second])
    core.step()
    assert records[-1].prefill_tokens
    assert (len(policy.recorded), len(policy.skipped)) == (4, 2)
    core.update_weights(*weights.pack(hf_state_dict(model), version=1))
    core.step()
    assert (len(policy.recorded), len(policy.skipped)) == (4, 3)
    core.step()
    assert (len(policy.recorded), len(policy.skipped)) == (5, 3)


def test_the_trace_has_every_lasting_change_once(tmp_path: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.004
        return now[0]

    model = tiny_model(tmp_path)
    requests = make_requests(9, seed=33)
    expected = run(engine(model), requests)
    policy = Turns([PLAIN, PLAIN, PLAIN, Strategy("oracle", 2), Strategy("oracle", 3)], None)
    core = NativeEngine(
        model, options_of(max_running=4), drafters={"oracle": Oracle(expected)}, policy=policy, clock=clock
    )
    core.submit(requests)
    trace = [point for event in drain(core) if isinstance(event, EngineWindow) for point in event.trace]
    assert {drafter for _, _, drafter in trace} == {"none", "oracle"}
    assert trace[-1][1:] == (0, "none")
    assert max(running for _, running, _ in trace) == 4
    for (before_s, *before), (after_s, *after) in pairwise(trace):
        assert before != after
        assert after_s >= before_s + TRACE_S or after == [0, "none"]
    assert np.all(np.diff([at_s for at_s, *_ in trace]) > 0)


def test_an_evaluation_has_windows_of_its_own_and_the_policy_learns_nothing(tmp_path: Path) -> None:
    """Also where both kinds run at once; no clock says when a window ends."""
    model = tiny_model(tmp_path)
    requests = make_requests(12, prompts=4, seed=31, max_new_tokens=30)
    requests = [replace(request, evaluation=i < 4) for i, request in enumerate(requests)]
    expected = run(engine(model), requests)
    policy = Turns([PLAIN, Strategy("oracle", 4)], 0.5)
    drafters = {"oracle": Oracle(expected, spoil=True)}
    records: list[EngineStepRecord] = []
    core = NativeEngine(
        model, options_of(max_running=4), drafters=drafters, policy=policy, clock=lambda: 0.0, steps=records
    )
    core.submit(requests)
    windows = [event for event in drain(core) if isinstance(event, EngineWindow)]
    assert len(windows) > 1
    assert all(before.evaluation != after.evaluation for before, after in pairwise(windows))
    assert sum(window.engine_steps for window in windows) == len(records)
    ordinary = [window for window in windows if not window.evaluation]
    drafted = sum(use.drafted for window in ordinary for use in window.strategies)
    assert drafted >= sum(step[2] for step in policy.recorded) > 0
    assert len(policy.recorded) <= sum(window.engine_steps for window in ordinary) < len(records)


def test_what_a_rollout_saved_is_measured_by_its_longest_response(tmp_path: Path) -> None:
    """Drafts that stand for some requests only: a plain step costs the same for any number, so 30 are saved at most."""

    class Flat(Turns):
        def plain_s(self, load: Load) -> float:
            return 1e-3

    class Half(Oracle):
        def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
            drafts = super().propose(batch, strategy)
            return Drafts(drafts.tokens, np.where(np.array(batch.request_ids) % 2, drafts.counts, 0))

    model = tiny_model(tmp_path)
    # Prompts of a token leave no step with chunks.
    made = make_requests(8, prompts=4, seed=31, max_new_tokens=30)
    requests = [replace(request, prompt_tokens=request.prompt_tokens[:1]) for request in made]
    expected = run(engine(model), requests)
    policy, records, ticks = Flat([PLAIN, Strategy("oracle", 4)], None), list[EngineStepRecord](), count()
    drafters = {"oracle": Half(expected)}
    core = NativeEngine(
        model, options_of(), drafters=drafters, policy=policy, steps=records, timer=lambda: float(next(ticks))
    )
    core.submit(requests)
    uses = [u for event in drain(core) if isinstance(event, EngineWindow) for u in event.strategies]
    drafted = [use for use in uses if use.strategy != str(PLAIN)]
    plain_steps = sum(use.engine_steps for use in uses if use.strategy == str(PLAIN))
    apart = sum(record.emitted / record.running for record in records) - 30
    assert abs(apart) > 3, "by steps alone"
    saved_s = 1e-3 * (30 - plain_steps) - sum(use.seconds for use in drafted)
    assert sum(use.saved_s for use in drafted) == pytest.approx(saved_s, abs=1e-6)
