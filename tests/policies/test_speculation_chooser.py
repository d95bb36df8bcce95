"""The adaptive choice in worlds whose best strategy is known: it finds it, follows it, and never costs much."""

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.speculation.arms import ArmBelief
from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.defaults import default_arms
from policies.speculation.policy import StepKind
from policies.speculation.strategy import PLAIN, Strategy
from tests.policies.loads import load, outcome
from tests.policies.speculation_sim import (
    Running,
    Simulation,
    World,
    arms,
    bound_share,
    constant,
    elapsed_s,
    long_tail,
    lost_s,
    quiet,
    share,
    share_near_best,
    speedup,
)

DEFAULT = default_arms(("suffix", "ngram"))
SEEDS = range(3)


def build(
    chosen: Sequence[Strategy] = DEFAULT, *, max_running: int = 32, exploration: float = 0.01, window: int = 32
) -> AdaptivePolicy:
    return AdaptivePolicy(chosen, max_running=max_running, exploration=exploration, window=window)


def simulate(seed: int, chosen: Sequence[Strategy] = DEFAULT, *, exploration: float = 0.01) -> Simulation:
    return Simulation(build(chosen, exploration=exploration), seed)


def beliefs_at(simulation: Simulation, running: int) -> dict[Strategy, ArmBelief]:
    assert isinstance(simulation.policy, AdaptivePolicy)
    return {b.strategy: b for b in simulation.policy.beliefs() if b.first <= running <= b.last}


# Finding the best.

DEEP = World({"suffix": 0.9, "ngram": 0.5})
NGRAM = World({"suffix": 0.3, "ngram": 0.8})
SHALLOW = World({"suffix": 0.6}, row_s=40e-6, draft_s={"suffix": 5e-6})
NOTHING = World({"suffix": 0.15}, row_s=40e-6)


@pytest.mark.parametrize(
    ("world", "running", "chosen", "best"),
    [
        (DEEP, 1, arms("suffix:2", "suffix:8", "ngram:8", "ngram:3"), "suffix:8"),
        (DEEP, 1, arms("ngram:8", "suffix:4", "suffix:12x2/16"), "suffix:12x2/16"),
        (NGRAM, 1, arms("suffix:8", "suffix:2", "ngram:6"), "ngram:6"),
        (NGRAM, 8, arms("suffix:4", "ngram:6", "ngram:2"), "ngram:2"),
        (replace(NGRAM, stalls=0.002), 1, arms("suffix:8", "suffix:2", "ngram:6"), "ngram:6"),
        (SHALLOW, 1, arms("suffix:16", "suffix:8", "suffix:2"), "suffix:2"),
        (NOTHING, 1, arms("suffix:16", "suffix:8", "suffix:2"), "plain"),
        (NOTHING, 16, arms("suffix:16", "suffix:8", "suffix:2"), "plain"),
    ],
)
def test_the_best_arm_is_nine_tenths_of_what_follows_the_warm_up(
    world: World, running: int, chosen: Sequence[Strategy], best: str
) -> None:
    strategy = Strategy.parse(best)
    for seed in SEEDS:
        simulation = simulate(seed, chosen)
        assert world.best(simulation.policy.arms_at(running), running) == strategy
        simulation.run(world, constant(running), 3000)
        assert share(simulation.run(world, constant(running), 5000), strategy) >= 0.9


@pytest.mark.parametrize("world", [DEEP, NGRAM, NOTHING], ids=["deep", "ngram", "nothing"])
@pytest.mark.parametrize("running", [1, 3, 8, 16, 32])
def test_with_the_default_arms_a_strategy_as_good_as_the_best_is_held(world: World, running: int) -> None:
    for seed in SEEDS:
        simulation = simulate(seed)
        simulation.run(world, constant(running), 4000)
        after = simulation.run(world, constant(running), 4000)
        assert share_near_best(after, simulation.policy.arms_at(running), within=0.9) >= 0.9
        assert bound_share(after, simulation.policy.arms_at) >= 0.95


@pytest.mark.parametrize("stalls", [0.0, 0.002])
@pytest.mark.parametrize("world", [DEEP, NGRAM, NOTHING], ids=["deep", "ngram", "nothing"])
def test_a_long_tail_gets_nine_tenths_of_the_bound(world: World, stalls: float) -> None:
    """Waves of 64 requests decay to one: above the switch, then through every bucket of batch sizes."""
    world = replace(world, stalls=stalls)
    for seed in SEEDS:
        simulation = simulate(seed)
        steps = simulation.run(world, long_tail(64), 4000)
        assert {step.running for step in steps} >= {1, 64}
        assert bound_share(steps, simulation.policy.arms_at) >= 0.9
        assert all(step.strategy == PLAIN for step in steps if step.running > 32)


def test_every_arm_is_tried() -> None:
    for world in (DEEP, NGRAM):
        simulation = simulate(0)
        simulation.run(world, constant(1), 8000)
        believed = beliefs_at(simulation, 1)
        assert set(believed) == {PLAIN, *DEFAULT}
        assert all(belief.holds > 0 and belief.reward is not None for belief in believed.values())


def test_every_drafter_is_tried_even_where_nothing_pays() -> None:
    simulation = simulate(0)
    steps = simulation.run(NOTHING, constant(1), 3000)
    assert {step.strategy.drafter for step in steps} == {"none", "suffix", "ngram"}


def test_beliefs_are_the_true_gains() -> None:
    world = quiet(World({"suffix": 1.0}))
    simulation = simulate(0, arms("suffix:8", "suffix:2"))
    simulation.run(world, constant(2), 3000)
    for strategy, belief in beliefs_at(simulation, 2).items():
        assert belief.reward == pytest.approx(world.gain(strategy, 2), rel=0.02)
    assert simulation.policy.plain_s(load(2)) == pytest.approx(world.step_s(PLAIN, 2))


def test_what_interrupts_the_machine_says_nothing_of_an_arm() -> None:
    world = World({"suffix": 1.0}, stalls=0.02)
    simulation = simulate(0, arms("suffix:8"))
    simulation.run(world, constant(2), 4000)
    for strategy, belief in beliefs_at(simulation, 2).items():
        assert belief.reward == pytest.approx(world.gain(strategy, 2), rel=0.06)
    assert simulation.policy.plain_s(load(2)) == pytest.approx(world.step_s(PLAIN, 2), rel=0.06)


# Change.

FALLS = World({"suffix": 0.85, "ngram": 0.3})


def window_of(simulation: Simulation, world: World, running: int, best: Strategy) -> int:
    """Steps in which a window (32 measurements) of the arm in use fills."""
    before = beliefs_at(simulation, running)[best].holds
    steps = simulation.run(world, constant(running), 2000)
    holds = beliefs_at(simulation, running)[best].holds - before
    return math.ceil(32 * sum(step.strategy == best for step in steps) / holds)


@pytest.mark.parametrize("running", [1, 4])
@pytest.mark.parametrize(
    ("after", "best"),
    [(World({"ngram": 0.8}), "ngram:6"), (World(), "plain")],
    ids=["another drafter", "plain decoding"],
)
def test_recovers_within_a_window_when_the_best_arm_falls(after: World, best: str, running: int) -> None:
    chosen = arms("suffix:8", "ngram:6")
    for seed in SEEDS:
        simulation = simulate(seed, chosen)
        simulation.run(FALLS, constant(running), 4000)
        window = window_of(simulation, FALLS, running, chosen[0])
        assert after.best(chosen, running) == Strategy.parse(best)
        simulation.run(after, constant(running), window)
        assert share(simulation.run(after, constant(running), 1000), Strategy.parse(best)) >= 0.9


def test_with_the_default_arms_a_fall_costs_less_than_a_window() -> None:
    after = World({"ngram": 0.8})
    for seed in SEEDS:
        simulation = simulate(seed)
        simulation.run(FALLS, constant(1), 4000)
        window = window_of(simulation, FALLS, 1, FALLS.best(DEFAULT, 1))
        simulation.run(after, constant(1), window)
        assert bound_share(simulation.run(after, constant(1), 2000), simulation.policy.arms_at) >= 0.85


def test_what_rises_unseen_is_found_by_exploration() -> None:
    """Nothing falls: only the trials that backed off can tell, at the latest when the longest wait is over."""
    before, after = World({"suffix": 0.6}), World({"suffix": 0.6, "ngram": 0.95})
    for seed in SEEDS:
        simulation = simulate(seed, arms("suffix:8", "ngram:12"))
        simulation.run(before, constant(1), 3000)
        simulation.run(after, constant(1), 25_000)
        assert share(simulation.run(after, constant(1), 1000), Strategy.parse("ngram:12")) >= 0.9


def test_speculation_comes_back_when_it_pays_again() -> None:
    for seed in SEEDS:
        simulation = simulate(seed)
        simulation.run(DEEP, constant(1), 3000)
        nothing = simulation.run(NOTHING, constant(1), 8000)
        assert share(nothing[2000:], PLAIN) >= 0.95
        simulation.run(DEEP, constant(1), 12_000)
        assert speedup(simulation.run(DEEP, constant(1), 1000)) > 0.85 * DEEP.gain(DEEP.best(DEFAULT, 1), 1)


def test_a_machine_that_becomes_slower_changes_no_belief_for_long() -> None:
    """Rewards are speed-ups: with every pass twice as long, the same arm stays."""
    chosen = arms("suffix:8", "ngram:8")
    slow = World(
        FALLS.accept, fixed_s=2 * FALLS.fixed_s, row_s=2 * FALLS.row_s, draft_s={"suffix": 60e-6, "ngram": 60e-6}
    )
    simulation = simulate(0, chosen)
    simulation.run(FALLS, constant(2), 4000)
    assert share(simulation.run(slow, constant(2), 4000), chosen[0]) >= 0.9


# What it costs.

SCHEDULES: dict[str, Callable[[], Running]] = {
    "1": lambda: constant(1),
    "4": lambda: constant(4),
    "16": lambda: constant(16),
    "32": lambda: constant(32),
    "long tail": lambda: long_tail(64),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("draft_s", [5e-6, 30e-6, 300e-6])
def test_with_every_draft_rejected_it_is_within_three_per_cent_of_plain(schedule: str, draft_s: float) -> None:
    hostile = World(draft_s={"suffix": draft_s, "ngram": draft_s})
    for seed in SEEDS:
        simulation = simulate(seed)
        for _ in range(4):
            steps = simulation.run(hostile, SCHEDULES[schedule](), 2500)
            plain_s = sum(hostile.step_s(PLAIN, step.running) for step in steps)
            expected_s = sum(hostile.step_s(step.strategy, step.running) for step in steps)
            assert expected_s <= 1.03 * plain_s


@pytest.mark.parametrize("exploration", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("running", [1, 8, 32])
@pytest.mark.parametrize("accept", [{}, {"suffix": 1.0}, {"ngram": 1.0, "eagle": 0.02}], ids=["none", "one", "two"])
def test_exploration_keeps_to_its_share_of_decode_time(
    exploration: float, running: int, accept: dict[str, float]
) -> None:
    """Where one look tells which arm is best, all that is lost once it was seen, and all that other drafts lose before,
    is exploration: its share of the time, and a grant worth a few plain steps."""
    chosen = arms("suffix:4", "ngram:4", "eagle:4")
    world = quiet(World(accept, row_s=2e-6))
    best = world.best(chosen, running)
    steps = simulate(0, chosen, exploration=exploration).run(world, constant(running), 10_000)
    seen = next((i for i, step in enumerate(steps) if step.strategy == best), len(steps))
    explored = [step for i, step in enumerate(steps) if i > seen or step.strategy != PLAIN]
    granted_s = lost_s(explored, chosen) - exploration * elapsed_s(steps)
    assert granted_s <= 40 * world.step_s(PLAIN, running)
    if exploration:
        assert share(steps[2000:], best) >= 0.9


def test_without_exploration_plain_stays_when_the_first_look_shows_nothing() -> None:
    simulation = simulate(0, exploration=0.0)
    steps = simulation.run(World(), constant(1), 5000)
    assert share(steps[500:], PLAIN) == 1.0


def test_more_is_explored_where_more_is_allowed() -> None:
    spent = [
        lost_s(simulate(0, exploration=e).run(quiet(World()), constant(1), 20_000), DEFAULT) for e in (0, 0.01, 0.1)
    ]
    assert spent[0] < spent[1] < spent[2]


# Determinism and robustness.


def choices(policy: AdaptivePolicy, seed: int) -> list[Strategy]:
    simulation = Simulation(policy, seed)
    simulation.run(FALLS, long_tail(48), 1500)
    simulation.run(World({"ngram": 0.7}), long_tail(48), 1500, prefill_every=40)
    return [step.strategy for step in simulation.steps]


def test_same_records_same_choices() -> None:
    assert choices(build(), 1) == choices(build(), 1) == choices(pickle.loads(pickle.dumps(build())), 1)
    assert choices(build(), 1) != choices(build(), 2)


times = st.one_of(st.sampled_from((0.0, 1e-9, 1e-4, 5.0)), st.floats(1e-6, 1e-2))
records = st.tuples(
    st.integers(1, 40),  # running
    st.floats(0, 1),  # share of the drafted tokens that is accepted
    times,
    st.sampled_from(("record", "record", "record", "skip", "other", "lost")),
    st.integers(1, 12),  # how often
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(records, max_size=80),
    st.sampled_from((1, 2, 32)),
    st.sampled_from((0.0, 0.01, 0.5)),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(0, 60)),
)
def test_nothing_it_is_told_breaks_it(
    told: list[tuple[int, float, float, str, int]],
    max_running: int,
    exploration: float,
    window: int,
    fails_at: int | None,
) -> None:
    """Arbitrary times (a clock that stands still too), steps that are skipped, never reported or ran another way."""
    policy = build(max_running=max_running, exploration=exploration, window=window)
    failed = False
    for index, (running, accepted, step_s, how, times) in enumerate(told):
        if index == fails_at:
            policy.unavailable("suffix")
            failed = True
        for _ in range(times):
            strategy = policy.choose(load(running))
            assert strategy == PLAIN or strategy in policy.arms_at(running)
            assert strategy.tokens_to_verify <= policy.max_nodes
            assert not (failed and strategy.drafter == "suffix")
            assert running <= max_running or strategy == PLAIN
            if how == "skip":
                policy.record(outcome(strategy, running, 0, 0, step_s, kind=StepKind.DISTURBED))
            elif how != "lost":
                ran = PLAIN if how == "other" else strategy
                drafted = ran.tokens_to_verify * running
                policy.record(outcome(ran, running, drafted, int(accepted * drafted), step_s))
    for belief in policy.beliefs():
        assert belief.reward is None or (math.isfinite(belief.reward) and belief.reward >= 0)
        assert not (failed and belief.strategy.drafter == "suffix")
    assert all(policy.plain_s(load(running)) is None or policy.plain_s(load(running)) > 0 for running in (1, 7, 32, 64))


def test_nothing_measured_is_nothing_chosen() -> None:
    policy = build()
    for _ in range(300):
        policy.record(outcome(policy.choose(load(4)), 4, 0, 0, 1e-3, kind=StepKind.DISTURBED))
    assert policy.choose(load(4)) == PLAIN
    assert policy.plain_s(load(4)) is None
    assert all(belief.holds == 0 for belief in policy.beliefs())


def test_steps_with_prompt_chunks_are_no_measurement() -> None:
    chosen = arms("suffix:8", "ngram:8")
    simulation = simulate(0, chosen)
    simulation.run(DEEP, constant(2), 4000, prefill_every=3)
    assert share(simulation.run(DEEP, constant(2), 2000, prefill_every=3), chosen[0]) >= 0.9
    assert beliefs_at(simulation, 2)[chosen[0]].reward == pytest.approx(DEEP.gain(chosen[0], 2), rel=0.15)


def test_an_evaluation_is_decoded_with_the_best_arm_and_changes_no_belief() -> None:
    """Of its steps nothing is told: no trial is made again and again, waiting for an outcome."""
    for warm_up in (3000, 3500, 4000):
        simulation = simulate(0, exploration=0.2)
        simulation.run(DEEP, constant(1), warm_up)
        policy, chosen, believed = simulation.policy, [], []
        best = DEEP.best(policy.arms_at(1), 1)
        for _ in range(3000):
            chosen.append(policy.choose(load(1)))
            policy.record(outcome(chosen[-1], 1, 0, 0, 0.006, kind=StepKind.DISTURBED))
            believed.append(beliefs_at(simulation, 1))
        assert believed[-1] == believed[500], "but for the hold that it found"
        assert DEEP.gain(chosen[-1], 1) >= 0.9 * DEEP.gain(best, 1)
        assert chosen.count(chosen[-1]) >= 0.9 * len(chosen)


def test_steps_above_the_switch_are_no_measurement_of_the_arm_before_them() -> None:
    chosen, world = arms("suffix:8", "suffix:4"), quiet(World({"suffix": 1.0}))
    simulation = simulate(0, chosen)
    for running in (8, 40) * 4:
        simulation.run(world, constant(running), 1500)
        believed = beliefs_at(simulation, 8)[chosen[0]]
        assert believed.reward == pytest.approx(world.gain(chosen[0], 8), rel=0.02)
    assert simulation.policy.plain_s(load(40)) == pytest.approx(world.step_s(PLAIN, 40))


@pytest.mark.parametrize("running", [8, 40])
def test_memory_does_not_grow_with_steps(running: int) -> None:
    simulation = simulate(0)
    simulation.run(DEEP, constant(running), 5000)
    before = len(pickle.dumps(simulation.policy))
    simulation.run(DEEP, constant(running), 20_000)
    assert len(pickle.dumps(simulation.policy)) < 1.5 * before + 2000


# Drafters that fail, or are not worth it.


def test_an_unavailable_drafter_is_replaced_at_once() -> None:
    chosen = arms("suffix:8", "ngram:8")
    simulation = simulate(0, chosen)
    simulation.run(DEEP, constant(1), 3000)
    assert simulation.policy.choose(load(1)) == chosen[0]
    simulation.policy.unavailable("suffix")
    simulation.policy.record(outcome(chosen[0], 1, 8, 8, 1e-9))  # the step in which it failed
    after = simulation.run(DEEP, constant(1), 3000)
    assert share(after, chosen[0]) == 0
    assert share(after[1000:], chosen[1]) >= 0.9
    assert list(simulation.policy.arms_at(1)) == [chosen[1]]
    simulation.policy.unavailable("ngram")
    assert share(simulation.run(DEEP, constant(1), 500), PLAIN) == 1


def test_a_drafter_that_failed_comes_back_with_new_weights() -> None:
    simulation = simulate(0)
    simulation.run(DEEP, constant(1), 3000)
    simulation.policy.unavailable("suffix")
    assert all(step.strategy.drafter != "suffix" for step in simulation.run(DEEP, constant(1), 1000))
    before = len(simulation.policy.arms_at(1))
    simulation.policy.renewed("suffix")
    simulation.policy.renewed("suffix")
    assert len(simulation.policy.arms_at(1)) == len([arm for arm in DEFAULT if arm.tokens_to_verify <= 64]) > before
    steps = simulation.run(DEEP, constant(1), 4000)
    assert sum(step.strategy.drafter == "suffix" for step in steps) > 2000


def test_a_failed_drafter_of_the_very_first_steps_is_never_tried() -> None:
    policy = build()
    policy.unavailable("suffix")
    policy.unavailable("nobody")
    steps = Simulation(policy).run(DEEP, constant(1), 3000)
    assert {step.strategy.drafter for step in steps} == {"none", "ngram"}


def test_a_network_that_does_not_pay_gives_way_to_the_model_free_drafters() -> None:
    world = World({"eagle": 0.7, "ngram": 0.6}, draft_s={"eagle": 400e-6})
    chosen = default_arms(("eagle", "ngram"))
    for seed in SEEDS:
        simulation = simulate(seed, chosen)
        simulation.run(world, constant(1), 3000)
        after = simulation.run(world, constant(1), 3000)
        assert sum(step.strategy.drafter == "ngram" for step in after) >= 0.9 * len(after)


def test_no_arms_is_plain_decoding() -> None:
    simulation = simulate(0, ())
    assert share(simulation.run(World(), long_tail(64), 500), PLAIN) == 1
    assert simulation.policy.max_nodes == 0


# What plain decoding costs, for the seconds that are said to be saved.


def test_a_machine_that_becomes_faster_does_not_inflate_what_is_saved() -> None:
    """Plain decoding was measured while the machine was six times slower, and an arm has been in use ever since: the
    seconds saved were once six times too many."""
    chosen = arms("suffix:8")
    fast = quiet(World({"suffix": 0.85}))
    slow = replace(fast, fixed_s=6 * fast.fixed_s, row_s=6 * fast.row_s, draft_s={"suffix": 6 * 30e-6})
    simulation = simulate(0, chosen)
    simulation.run(slow, constant(2), 3000)
    simulation.run(fast, constant(2), 400)
    claimed = saved_s = 0.0
    for _ in range(4000):
        plain_s = simulation.policy.plain_s(load(2))
        (step,) = simulation.run(fast, constant(2), 1)
        claimed += (plain_s or 0.0) * (1 + step.accepted / 2) - step.elapsed_s if step.strategy.depth else 0.0
        saved_s += step.plain_s - step.elapsed_s
    assert claimed == pytest.approx(saved_s, rel=0.05)


def test_plain_decoding_is_measured_again_while_speculation_pays() -> None:
    """Or nothing could be said of what it saves."""
    simulation = simulate(0, arms("suffix:8"))
    for _ in range(8):
        simulation.run(DEEP, constant(2), 2000)
        assert simulation.policy.plain_s(load(2)) is not None


def test_without_a_recent_measurement_there_is_no_plain_cost() -> None:
    simulation = simulate(0, arms("suffix:8"), exploration=0.0)
    simulation.run(DEEP, constant(2), 300)
    assert simulation.policy.plain_s(load(2)) is not None
    simulation.run(DEEP, constant(2), 6000)
    assert simulation.policy.plain_s(load(2)) is None
