"""The planned choice in worlds whose best strategy is known: it finds it, follows it, and never costs much."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.strategy import PLAIN, Strategy
from policies.calibration.costs import CostModel
from policies.speculation.acceptance import AcceptanceModel
from policies.speculation.chooser import LONG_STEPS, AdaptivePolicy
from policies.speculation.defaults import default_arms
from policies.speculation.policy import Reason
from policies.steps import NO_REQUESTS, Load, StepKind
from tests.params import long
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
    speedup,
)

DEFAULT = default_arms(("suffix", "ngram"))
SEEDS = range(3)
# Machines: a small model on a processor, a larger one (a row costs a sixth of a pass), and a GPU (a 200th).
DEMO = World()
STEEP = World(fixed_s=2e-3, row_s=0.35e-3, draft_s={"suffix": 60e-6, "ngram": 50e-6})
GPU = World(fixed_s=6e-3, row_s=28e-6, draft_s={"suffix": 50e-6, "ngram": 50e-6})
MACHINES = {"demo": DEMO, "steep": STEEP, "gpu": GPU}
DRAFTERS = {
    "deep": World({"suffix": 0.9, "ngram": 0.5}),
    "ragged": World({"suffix": 0.85, "ngram": 0.7}, says={"suffix": 0.6, "ngram": 0.3}),
    "low": World({"suffix": 0.4, "ngram": 0.3}),
    "hostile": World(),
}
DEEP, NGRAM = DRAFTERS["deep"], World({"suffix": 0.3, "ngram": 0.8})
NOTHING = World({"suffix": 0.15}, row_s=40e-6)


def on(machine: str, drafters: str) -> World:
    return replace(MACHINES[machine], accept=DRAFTERS[drafters].accept, says=DRAFTERS[drafters].says)


def build(
    chosen: Sequence[Strategy] = DEFAULT,
    world: World | None = None,
    *,
    max_running: int = 32,
    exploration: float = 0.01,
    lag: int = 0,
) -> AdaptivePolicy:
    """With a calibration of the world's machine, if one is given."""
    costs = CostModel(None if world is None else world.calibration(chosen))
    return AdaptivePolicy(chosen, costs=costs, max_running=max_running, exploration=exploration, lag=lag)


def simulate(
    seed: int, chosen: Sequence[Strategy] = DEFAULT, world: World | None = None, *, exploration: float = 0.01
) -> Simulation:
    return Simulation(build(chosen, world, exploration=exploration), seed)


def steps_of(world: World, running: int, seconds: float) -> int:
    """Plain steps in so long."""
    return max(int(seconds / world.step_s(PLAIN, running)), 20)


# Regret.


@pytest.mark.parametrize("drafters", DRAFTERS)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("running", [1, 8, *long(2, 4, 16, 32)])
def test_with_a_calibration_little_is_lost_against_the_best_in_hindsight(
    machine: str, drafters: str, running: int
) -> None:
    """The first two seconds, and what follows. A single request that has bad luck with its first drafts, which are
    ragged, waits for the allowance: there are 300 steps in them on the GPU."""
    world = on(machine, drafters)
    first, then = [], []
    for seed in SEEDS:
        simulation = simulate(seed, world=world)
        steps = min(steps_of(world, running, 2.0), 3000)
        first += simulation.run(world, constant(running), steps)
        then += simulation.run(world, constant(running), min(steps, 1500))
    assert bound_share(first, simulation.policy.arms_at) >= (0.85 if running == 1 else 0.9)
    assert bound_share(then, simulation.policy.arms_at) >= 0.94


@pytest.mark.parametrize("drafters", DRAFTERS)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("running", [4, *long(1, 16)])
def test_without_one_it_is_found_a_little_later(machine: str, drafters: str, running: int) -> None:
    world, then = on(machine, drafters), []
    for seed in SEEDS:
        simulation = simulate(seed)
        simulation.run(world, constant(running), min(steps_of(world, running, 4.0), 4000))
        then += simulation.run(world, constant(running), min(steps_of(world, running, 2.0), 1500))
    assert bound_share(then, simulation.policy.arms_at) >= 0.93


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("running", [1, 2, 4, 8, 16, 32])
def test_cold_with_every_draft_rejected_it_is_within_three_per_cent_of_plain(machine: str, running: int) -> None:
    """Over 0.4 s, as the shortest run that is measured."""
    hostile = on(machine, "hostile")
    for seed in SEEDS:
        steps = simulate(seed, world=hostile).run(hostile, constant(running), steps_of(hostile, running, 0.4))
        assert bound_share(steps, lambda running: ()) >= 0.97


def test_a_copy_of_the_target_drafts_as_soon_as_making_it_is_a_small_part_of_decoding() -> None:
    """Its acceptance is known before anything is measured, and its costs are calibrated, but not what making it takes.
    A drafter that only lost has no part in what others may lose for long."""
    world = World({"self": 0.98}, fixed_s=2e-3, row_s=0.35e-3, pass_s={"self": 0.4e-3})
    chosen = (*DEFAULT, *arms("self:3", "self:5", "self:7", "self:10"))
    for running in (1, 2, 4):
        simulation = simulate(1, chosen, world)
        simulation.run(world, constant(running), 1500)
        steps = simulation.run(world, constant(running), 100)
        assert sum(step.strategy.drafter == "self" for step in steps) >= 80
        assert bound_share(steps, lambda running: chosen) >= 0.93


# Finding the best.

SHALLOW = World({"suffix": 0.6}, row_s=40e-6, draft_s={"suffix": 5e-6})


@pytest.mark.parametrize(
    ("world", "running", "chosen", "best"),
    [
        (DEEP, 1, arms("suffix:2", "suffix:8", "ngram:8", "ngram:3"), "suffix:8"),
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
        simulation.run(world, constant(running), 1500)
        assert share(simulation.run(world, constant(running), 3000), strategy) >= 0.9


@pytest.mark.parametrize("stalls", [0.0, 0.002])
@pytest.mark.parametrize("world", [DEEP, NGRAM, NOTHING], ids=["deep", "ngram", "nothing"])
def test_a_long_tail_gets_nine_tenths_of_the_bound(world: World, stalls: float) -> None:
    """Waves of 64 requests decay to one: above the switch, then through every bucket of batch sizes."""
    world = replace(world, stalls=stalls)
    for seed in SEEDS:
        simulation = simulate(seed)
        steps = simulation.run(world, long_tail(64), 4000)
        assert {step.running for step in steps} >= {1, 64}
        assert bound_share(steps, simulation.policy.arms_at) >= 0.93
        assert all(step.strategy == PLAIN for step in steps if step.running > 32)


def test_what_is_learned_at_one_batch_size_holds_at_all() -> None:
    """Acceptance does not depend on the batch: the tail's single requests teach what eight can do."""
    simulation = simulate(0, world=DEEP)
    simulation.run(DEEP, constant(1), 1500)
    steps = simulation.run(DEEP, constant(8), 40)
    assert bound_share(steps, simulation.policy.arms_at) >= 0.95


def test_the_problems_that_run_decide() -> None:
    """The index of one problem knows its text, that of the other knows nothing. Together they pay a little."""
    world = World({"suffix": 0.95}, problems={1: 1.0, 2: 0.1}, row_s=30e-6)
    policy = build(arms("suffix:8", "suffix:2"), world)
    simulation = Simulation(policy, 0, problems=lambda running: np.arange(1, running + 1))
    simulation.run(world, constant(2), 1500)
    for problem, deep in ((1, True), (2, False)):
        policy.renewed("nobody")  # every decision is made anew
        prompt_ids = np.array([problem])
        assert ([policy.choose(Load(1, 0, 100, prompt_ids)) for _ in range(20)][-1].depth == 8) is deep


def test_steps_beside_prompt_chunks_teach_acceptance_but_no_time() -> None:
    chosen = arms("suffix:8", "ngram:8")
    simulation = simulate(1, chosen, DEEP)
    steps = simulation.run(DEEP, constant(2), 3000, prefill_every=2)
    assert share(steps[1500:], chosen[0]) >= 0.9
    assert simulation.policy.plain_s(load(2)) == pytest.approx(DEEP.step_s(PLAIN, 2), rel=0.15)


# Change.

FALLS = World({"suffix": 0.85, "ngram": 0.3})


@pytest.mark.parametrize("running", [1, 4])
@pytest.mark.parametrize(
    ("after", "best"),
    [(World({"ngram": 0.8}), "ngram:6"), (World(), "plain")],
    ids=["another drafter", "plain decoding"],
)
def test_recovers_when_the_best_arm_falls(after: World, best: str, running: int) -> None:
    chosen = arms("suffix:8", "ngram:6")
    for seed in SEEDS:
        simulation = simulate(seed, chosen)
        simulation.run(FALLS, constant(running), 3000)
        assert after.best(chosen, running) == Strategy.parse(best)
        simulation.run(after, constant(running), 2000)
        assert share(simulation.run(after, constant(running), 1000), Strategy.parse(best)) >= 0.9


def test_what_rises_unseen_is_found_by_exploration() -> None:
    """Nothing falls: only doubt, which grows back, can tell."""
    before, after = World({"suffix": 0.6}), World({"suffix": 0.6, "ngram": 0.95})
    for seed in SEEDS:
        simulation = simulate(seed, arms("suffix:8", "ngram:12"))
        simulation.run(before, constant(1), 3000)
        simulation.run(after, constant(1), 20_000)
        assert share(simulation.run(after, constant(1), 1000), Strategy.parse("ngram:12")) >= 0.9


def test_speculation_comes_back_when_it_pays_again() -> None:
    nothing_stands = World({"suffix": 0.1})
    for seed in SEEDS:
        simulation = simulate(seed)
        simulation.run(DEEP, constant(1), 3000)
        nothing = simulation.run(nothing_stands, constant(1), 8000)
        assert bound_share(nothing[2000:], simulation.policy.arms_at) >= 0.95
        simulation.run(DEEP, constant(1), 12_000)
        assert speedup(simulation.run(DEEP, constant(1), 1000)) > 0.85 * DEEP.gain(DEEP.best(DEFAULT, 1), 1)


def test_a_machine_that_becomes_slower_changes_no_belief_for_long() -> None:
    """With every pass twice as long, the same arm stays."""
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


@pytest.mark.parametrize("schedule", ["1", "long tail", *long("4", "16", "32")])
@pytest.mark.parametrize("draft_s", [5e-6, 300e-6, *long(30e-6)])
def test_without_a_calibration_too_every_draft_rejected_costs_at_most_three_per_cent(
    schedule: str, draft_s: float
) -> None:
    hostile = World(draft_s={"suffix": draft_s, "ngram": draft_s})
    for seed in SEEDS:
        simulation = simulate(seed)
        for _ in range(4):
            steps = simulation.run(hostile, SCHEDULES[schedule](), 2500)
            assert bound_share(steps, lambda running: ()) >= 0.97


@pytest.mark.parametrize("exploration", [0.0, 0.01, *long(0.05)])
@pytest.mark.parametrize("running", [1, 32, *long(8)])
@pytest.mark.parametrize("accept", [{}, {"suffix": 1.0}, {"ngram": 1.0, "eagle": 0.02}], ids=["none", "one", "two"])
def test_exploration_keeps_to_its_share_of_decode_time(
    exploration: float, running: int, accept: dict[str, float]
) -> None:
    """All that is lost against the best arm once it was seen, and all that others lose before: its share of the time,
    and a grant worth a few dozen plain steps."""
    chosen = arms("suffix:4", "ngram:4", "eagle:4")
    world = quiet(World(accept, row_s=2e-6))
    best = world.best(chosen, running)
    steps = simulate(0, chosen, world, exploration=exploration).run(world, constant(running), 10_000)
    seen = next((i for i, step in enumerate(steps) if step.strategy == best), len(steps))
    explored = [step for i, step in enumerate(steps) if i > seen or step.strategy != PLAIN]
    granted_s = lost_s(explored, chosen) - exploration * elapsed_s(steps)
    assert granted_s <= 60 * world.step_s(PLAIN, running)
    if exploration:
        assert share(steps[2000:], best) >= 0.9


# What is said of it.


def test_reasons_and_what_would_have_been_gained() -> None:
    def decide(world: World, running: int, seconds: float = 0.3) -> tuple[Reason, float | None]:
        policy = build(arms("suffix:4"), world, exploration=0.0)
        Simulation(policy).run(world, constant(running), steps_of(world, running, seconds))
        return policy.reason, policy.advantage

    reason, advantage = decide(on("demo", "deep"), 1)
    assert reason is Reason.PAYS_MOST
    assert advantage == pytest.approx(DEEP.gain(Strategy.parse("suffix:4"), 1), rel=0.1)
    reason, advantage = decide(on("steep", "hostile"), 8)
    assert reason is Reason.PLAIN_IS_FASTER
    assert advantage is not None
    assert advantage < 1
    assert decide(DEEP, 33) == (Reason.TOO_MANY, None)
    policy = build(arms("suffix:4"), None)
    policy.choose(load(1))
    assert policy.reason is Reason.UNMEASURED
    policy.unavailable("suffix")
    policy.choose(load(1))
    assert policy.reason in (Reason.UNMEASURED, Reason.NO_DRAFTER)
    assert Simulation(build((), None)).run(DEEP, constant(1), 30)[-1].strategy == PLAIN


def test_long_steps_are_not_each_decided_anew_unless_they_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 70 ms, as of SmolLM2 on a processor. A plain one can lose nothing, one with drafts much."""
    decided = list[Load]()
    decide = AdaptivePolicy._decide

    def noted(self: AdaptivePolicy, load: Load, hold: object) -> None:
        decided.append(load)
        decide(self, load, hold)

    monkeypatch.setattr(AdaptivePolicy, "_decide", noted)
    useless = World(fixed_s=64e-3, row_s=2e-3)
    useful = World({"suffix": 0.98, "ngram": 0.98}, fixed_s=64e-3, row_s=1e-4)
    for world, every, plain in ((useless, LONG_STEPS, 1.0), (useful, 1, 0.0)):
        simulation = simulate(0, world=world)
        simulation.run(world, constant(4), 200)
        decided.clear()
        steps = simulation.run(world, constant(4), 200)
        assert share(steps, PLAIN) == pytest.approx(plain, abs=0.1)
        assert 200 / every <= len(decided) <= 1.1 * 200 / every


def test_trials_say_that_they_are() -> None:
    world, reasons = on("demo", "hostile"), set()
    policy = build(world=world)
    simulation = Simulation(policy)
    for _ in range(2000):
        (step,) = simulation.run(world, constant(4), 1)
        if step.strategy != PLAIN:
            reasons.add(policy.reason)
    assert reasons == {Reason.TRIAL}


def test_a_trial_of_a_tree_beside_early_text_costs_what_its_chain_lost_and_no_stake() -> None:
    """There the engine drafts the tree's chain. The policy has no such arm, and learns from it all the same."""
    tree = Strategy.parse("suffix:4x2/8")
    world = replace(NGRAM, accept={"suffix": 0.9})
    policy = build((tree,), world, exploration=1.0)
    while policy.choose(load(1)) is not tree:
        policy.record(outcome(PLAIN, 1, 0, 0, world.step_s(PLAIN, 1)))
    assert policy.reason is Reason.TRIAL
    credit_s = policy._credit_s
    beside = outcome(tree.chain, 1, 4, 4, 1.0, kind=StepKind.DISTURBED, prompt_tokens=64)
    policy.record(beside)
    policy._digest()
    assert policy._credit_s > credit_s, "the stake is back: time beside other rows is not the arm's"
    before = AcceptanceModel((tree,)).expected(NO_REQUESTS).accepted[0]
    assert policy.acceptance.expected(NO_REQUESTS).accepted[0] > before, "four of four were right"


def test_what_the_best_saves_while_a_trials_outcome_is_awaited_is_told_from_the_present_estimates() -> None:
    """A step of it that is as fast as the best without its drafter saves nothing."""
    world = replace(World({"suffix": 0.9, "ngram": 0.88}, row_s=1e-6), noise=0.3)
    policy, trials = build(arms("suffix:8", "suffix:4", "ngram:8", "ngram:4"), world, exploration=1.0, lag=4), 0
    booked: dict[str, float] = {}
    policy._ledger.saved = lambda drafter, seconds, once_s: booked.update({drafter: seconds})  # type: ignore[method-assign]
    simulation = Simulation(policy)
    while trials < 20:
        simulation.run(world, constant(1), 1)
        hold = policy._hold
        if hold.reason is not Reason.TRIAL or hold.left != policy._lag or hold.best is PLAIN:
            continue
        trials += 1
        plain_s = policy.plain_s(load(1))
        assert plain_s is not None
        rates = policy.acceptance.expected(np.zeros(1, np.int64))
        others = [i for i, arm in enumerate(policy._arms) if arm.drafter != hold.best.drafter]
        fastest = max(policy._rate(load(1), i, float(rates.rows[i]), float(rates.accepted[i])) for i in others)
        as_fast = outcome(hold.best, 1, hold.best.depth, 2, 3 / max(fastest, 1 / plain_s))
        booked.clear()
        policy._balance(hold.best, [as_fast], False)
        assert booked[hold.best.drafter] == pytest.approx(0.0, abs=0.2 * plain_s)


def test_the_time_of_a_step_is_expected_with_the_rows_it_had() -> None:
    world = quiet(on("demo", "ragged"))
    policy = build(world=world)
    Simulation(policy).run(world, constant(4), 2000)
    arm = Strategy.parse("suffix:8")
    for drafted in (0, 16, 32):
        found = policy.expected_s(outcome(arm, 4, drafted, 0, 1.0))
        assert found == pytest.approx(world.fixed_s + world.row_s * (4 + drafted) + world.drafting_s(arm), rel=0.1)
    assert policy.plain_s(load(4)) == pytest.approx(world.step_s(PLAIN, 4), rel=0.05)


def test_a_machine_that_becomes_faster_does_not_inflate_what_is_saved() -> None:
    """Plain decoding was measured while the machine was twice as slow, and an arm has been in use ever since."""
    chosen = arms("suffix:8")
    fast = quiet(World({"suffix": 0.85}))
    slow = replace(fast, fixed_s=2 * fast.fixed_s, row_s=2 * fast.row_s, draft_s={"suffix": 2 * 30e-6})
    simulation = simulate(0, chosen)
    simulation.run(slow, constant(2), 3000)
    simulation.run(fast, constant(2), 400)
    claimed = saved_s = 0.0
    for _ in range(4000):
        plain_s = simulation.policy.plain_s(load(2))
        (step,) = simulation.run(fast, constant(2), 1)
        claimed += (plain_s or 0.0) * (1 + step.accepted / 2) - step.elapsed_s if step.strategy.depth else 0.0
        saved_s += step.plain_s - step.elapsed_s
    assert claimed == pytest.approx(saved_s, rel=0.35)


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
    st.sampled_from(("record", "record", "record", "disturbed", "evaluation", "late", "other", "lost")),
    st.integers(1, 12),  # how often
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(records, max_size=60),
    st.sampled_from((1, 2, 32)),
    st.sampled_from((0.0, 0.01, 0.5)),
    st.sampled_from((0, 1)),
    st.one_of(st.none(), st.integers(0, 60)),
)
def test_nothing_it_is_told_breaks_it(
    told: list[tuple[int, float, float, str, int]], max_running: int, exploration: float, lag: int, fails_at: int | None
) -> None:
    """Arbitrary times (a clock that stands still too), steps that are disturbed, never reported or ran another way."""
    policy = build(max_running=max_running, exploration=exploration, lag=lag)
    kinds = {"disturbed": StepKind.DISTURBED, "evaluation": StepKind.EVALUATION, "late": StepKind.CAUGHT_UP}
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
            if how != "lost":
                ran = PLAIN if how == "other" else strategy
                drafted = ran.tokens_to_verify * running
                kind = kinds.get(how, StepKind.USUAL)
                policy.record(outcome(ran, running, drafted, int(accepted * drafted), step_s, kind=kind))
    assert all((policy.plain_s(load(running)) or 1) > 0 for running in (1, 7, 32, 64))
