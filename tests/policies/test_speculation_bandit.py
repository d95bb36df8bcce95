"""Mode paper against Algorithm 1 of TLT as it is printed, line by line."""

import math
import pickle
import random
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.strategy import PLAIN, Strategy
from policies.speculation.bandit import BegMabPolicy
from policies.speculation.policy import Reason
from policies.steps import StepKind
from tests.policies.loads import load, outcome
from tests.policies.speculation_sim import Simulation, World, arms, constant, long_tail, share

POOL = arms(
    "suffix:8", "eagle:4x2/8", "ngram:8", "suffix:4", "ngram:4", "eagle:2x3/4", "suffix:2", "ngram:2", "suffix:1"
)


class Algorithm1:
    """Lines 1 to 19, nothing else. A median of nothing is infinite: the paper does not say; it makes an arm tried."""

    def __init__(self, s: Sequence[Strategy], t: Sequence[int], epsilon: float, w: int, seed: int) -> None:
        verify = sorted({arm.tokens_to_verify for arm in s}, reverse=True)
        groups = [[arm for arm in s if arm.tokens_to_verify == count] for count in verify]  # 2
        ends = [*(after - 1 for after in t[1:]), math.inf]  # 3
        self.mapping = [(first, last, group) for first, last, group in zip(t, ends, groups, strict=True)]  # 4
        self.r = {arm: deque[float](maxlen=w) for arm in s}  # 5, 6
        self.epsilon, self.random = epsilon, random.Random(seed)

    def record(self, arm: Strategy, elapsed_time: float, accept_lens: Sequence[int], batch_size: int) -> None:
        a = sum(accept_lens) / batch_size + 1  # 8
        self.r[arm].append(a * batch_size / elapsed_time)  # 9, 10

    def select(self, batch_size: int) -> Strategy:
        (v,) = [group for first, last, group in self.mapping if first <= batch_size <= last]  # 12
        if len(v) == 1:  # 13
            return v[0]  # 14
        if self.random.random() < self.epsilon:  # 15, 16
            return self.random.choice(v)  # 17
        return max(v, key=lambda arm: self.median(self.r[arm]))  # 19

    @staticmethod
    def median(rewards: Sequence[float]) -> float:
        ordered, half = sorted(rewards), len(rewards) // 2
        if not ordered:
            return math.inf
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Strategy], list[int]]:
    chosen = draw(st.lists(st.sampled_from(POOL), min_size=1, unique=True))
    groups = len({arm.tokens_to_verify for arm in chosen})
    more = draw(st.lists(st.integers(2, 40), min_size=groups - 1, max_size=groups - 1, unique=True))
    return chosen, [1, *sorted(more)]


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from((0.0, 0.0, 0.1, 0.5, 1.0)), st.integers(1, 6), st.integers(0, 2**32))
def test_same_choices_as_the_printed_algorithm(
    case: tuple[list[Strategy], list[int]], epsilon: float, window: int, seed: int
) -> None:
    """Over 150 records each; every fourth step runs another strategy than the chosen one."""
    chosen, thresholds = case
    oracle = Algorithm1(chosen, thresholds, epsilon, window, seed)
    policy = BegMabPolicy(chosen, thresholds=thresholds, epsilon=epsilon, window=window, max_running=1000, seed=seed)
    draw = random.Random(seed)
    for _ in range(150):
        running = draw.choice((*thresholds, draw.randint(1, 48)))
        strategy = policy.choose(load(running))
        assert strategy == oracle.select(running)
        assert strategy in policy.arms_at(running)
        ran = draw.choice(chosen) if draw.random() < 0.25 else strategy
        lens = [draw.randint(0, ran.tokens_to_verify) for _ in range(running)]
        elapsed_s = draw.choice((1e-4, 2e-4, 2e-3)) * running
        oracle.record(ran, elapsed_s, lens, running)
        policy.record(outcome(ran, running, ran.tokens_to_verify * running, sum(lens), elapsed_s))


def test_the_median_of_the_window_counts() -> None:
    first, second = arms("suffix:8", "ngram:8")
    policy = build((first, second), epsilon=0, window=3)
    for elapsed_s in (1e-6, 9e-3, 9e-3):  # the first has the larger mean
        policy.record(outcome(first, 1, 8, 8, elapsed_s))
        policy.record(outcome(second, 1, 8, 8, 8e-3))
    assert policy.choose(load(1)) == second
    for _ in range(2):  # two of three
        policy.record(outcome(first, 1, 8, 8, 7e-3))
    assert policy.choose(load(1)) == first


def build(chosen: Sequence[Strategy], *, seed: int = 0, epsilon: float = 0.1, window: int = 32) -> BegMabPolicy:
    return BegMabPolicy(chosen, thresholds=None, epsilon=epsilon, window=window, max_running=32, seed=seed)


def test_without_thresholds_buckets_double_and_each_has_a_choice() -> None:
    policy = build(arms("suffix:16", "suffix:8", "suffix:4", "suffix:2", "suffix:1"))
    found = [[str(arm) for arm in policy.arms_at(running)] for running in (1, 15, 16, 32)]
    assert found == [*[["suffix:16", "suffix:8"]] * 2, *[["suffix:4", "suffix:2", "suffix:1"]] * 2]
    seven = build([Strategy("suffix", depth) for depth in range(1, 15)])
    begin = [n for n in range(1, 65) if n == 1 or seven.arms_at(n) != seven.arms_at(n - 1)]
    assert begin == [1, 2, 4, 8, 16, 32, 33], "the last: above max_running nothing is drafted"
    assert [len(build(arms("suffix:8")).arms_at(running)) for running in (1, 32)] == [1, 1]


def test_a_bucket_falls_back_on_its_other_drafter() -> None:
    policy = build(arms("eagle:8", "eagle:4", "ngram:6"))
    policy.unavailable("eagle")
    assert {policy.choose(load(running)) for running in (1, 2, 32)} == set(arms("ngram:6"))


def test_with_fewer_thresholds_the_last_groups_share_a_bucket() -> None:
    chosen = arms("suffix:8", "suffix:4", "suffix:2")
    policy = BegMabPolicy(chosen, thresholds=[1, 4], epsilon=0, window=4, max_running=32, seed=0)
    assert list(policy.arms_at(3)) == list(chosen[:1])
    assert list(policy.arms_at(4)) == list(chosen[1:])


def run(seed: int, steps: int = 2000) -> list[Strategy]:
    policy = build(arms("suffix:8", "ngram:8", "eagle:4x2/8", "suffix:4", "ngram:4"), seed=seed)
    world = World({"suffix": 0.7, "ngram": 0.5, "eagle": 0.6})
    return [step.strategy for step in Simulation(policy, seed=1).run(world, long_tail(24), steps)]


def test_same_seed_same_choices_and_another_seed_others() -> None:
    assert run(0) == run(0)
    assert run(0) != run(1)


def test_a_pickled_copy_chooses_the_same() -> None:
    policy = build(arms("suffix:8", "ngram:8"))
    copy = pickle.loads(pickle.dumps(policy))
    world = World({"suffix": 0.7, "ngram": 0.5})
    first, second = (Simulation(p, seed=3).run(world, constant(2), 500) for p in (policy, copy))
    assert [step.strategy for step in first] == [step.strategy for step in second]


@pytest.mark.parametrize(("suffix", "ngram", "best"), [(0.9, 0.3, "suffix:8"), (0.3, 0.9, "ngram:8")])
def test_exploits_the_best_and_explores_by_epsilon(suffix: float, ngram: float, best: str) -> None:
    chosen = arms("suffix:8", "ngram:8", "eagle:8")
    simulation = Simulation(build(chosen, epsilon=0.15))
    world = World({"suffix": suffix, "ngram": ngram, "eagle": 0.1})
    simulation.run(world, constant(4), 200)
    after = simulation.run(world, constant(4), 6000)
    exploring = 0.15 * 2 / 3  # the best arm is drawn in a third of the explorations
    spread = 4 * math.sqrt(exploring / 6000)
    assert share(after, Strategy.parse(best)) == pytest.approx(1 - exploring, abs=spread)
    assert all(share(after, arm) > 0.03 for arm in chosen)


def test_recovers_within_a_window_of_a_change() -> None:
    chosen = arms("suffix:8", "ngram:8")
    simulation = Simulation(build(chosen, window=32))
    simulation.run(World({"suffix": 0.9, "ngram": 0.5}), constant(1), 1000)
    changed = World({"ngram": 0.5})
    simulation.run(changed, constant(1), 32)
    assert share(simulation.run(changed, constant(1), 500), chosen[1]) > 0.9


def test_an_unavailable_drafter_is_left_out() -> None:
    policy = build(arms("suffix:8", "ngram:8", "eagle:8"))
    policy.unavailable("suffix")
    world = World({"suffix": 0.9})
    after = Simulation(policy).run(world, constant(1), 300)
    assert {step.strategy.drafter for step in after} == {"ngram", "eagle"}
    policy.unavailable("eagle")
    assert {policy.choose(load(1)) for _ in range(50)} == set(arms("ngram:8"))
    policy.unavailable("ngram")
    assert {(policy.choose(load(1)), policy.reason) for _ in range(50)} == {(PLAIN, Reason.NO_DRAFTER)}


def test_plain_decoding_may_be_an_arm_and_its_cost_is_known() -> None:
    policy = BegMabPolicy((PLAIN, *arms("suffix:8")), thresholds=[1], epsilon=0.1, window=8, max_running=32, seed=0)
    assert policy.plain_s(load(4)) is None
    hostile = World(noise=0.0)
    steps = Simulation(policy).run(hostile, constant(4), 500)
    assert share(steps[20:], PLAIN) > 0.9
    assert policy.plain_s(load(4)) == pytest.approx(hostile.step_s(PLAIN, 4), rel=0.01)


def test_skipped_steps_and_a_clock_that_stands_still_teach_nothing() -> None:
    first, second = arms("suffix:8", "ngram:8")
    policy = build((first, second), epsilon=0)
    policy.record(outcome(first, 1, 8, 0, 1e-3))
    policy.record(outcome(second, 1, 8, 4, 1e-3))
    policy.record(outcome(first, 1, 0, 0, 1e-9, kind=StepKind.DISTURBED))
    policy.record(outcome(first, 1, 8, 8, 0.0))
    assert policy.choose(load(1)) == second
