"""Plain prices that a calibration has wrong: found by plain steps now and then, which cost next to nothing."""

import pytest

from config.strategy import PLAIN, Strategy
from policies.calibration.costs import CostModel
from policies.calibration.document import Calibration
from policies.speculation.check import CHECK_STEPS, PlainCheck
from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.policy import Reason, StrategyPolicy
from policies.speculation.toggle import RooflinePolicy
from policies.steps import StepKind
from tests.policies.loads import load, outcome
from tests.policies.speculation_sim import Simulation, World, constant, share, speedup

ARM = Strategy("self", 3)
LOSES = World({"self": 0.8}, row_s=60e-6)  # at 8 requests
WINS = World({"self": 0.95}, row_s=4e-6)
RUNNING = 8


def wrong(world: World, times: float) -> Calibration:
    """A calibration whose plain steps take so many times their price."""
    right = world.calibration([ARM])
    passes = tuple(
        one.model_copy(update={"seconds": one.seconds * times}) if one.rows == one.requests else one
        for one in right.passes
    )
    return Calibration.measured(right.key, passes, right.drafts)


def policy_of(name: str, calibration: Calibration) -> StrategyPolicy:
    costs = CostModel(calibration)
    if name == "adaptive":
        return AdaptivePolicy([ARM], costs=costs, max_running=64, exploration=0.01)
    return RooflinePolicy([ARM], margin=0.02, near_ceiling=0.9, patience=3, max_running=64, costs=costs)


def rollouts(simulation: Simulation, world: World, count: int) -> None:
    for _ in range(count):
        simulation.run(world, constant(RUNNING), 150)
        simulation.run(world, constant(1), 20)
        simulation.new_target()


@pytest.mark.parametrize("name", ["adaptive", "roofline"])
def test_drafts_stop_where_only_a_wrong_plain_price_made_them_pay(name: str) -> None:
    assert LOSES.gain(ARM, RUNNING) < 0.9 < 1.3 < 2 * LOSES.gain(ARM, RUNNING)
    simulation = Simulation(policy_of(name, wrong(LOSES, 2.0)))
    rollouts(simulation, LOSES, 4)
    after = simulation.run(LOSES, constant(RUNNING), 400)
    assert share(after, PLAIN) > 0.95
    found = simulation.policy.plain_s(load(RUNNING))
    assert found == pytest.approx(LOSES.step_s(PLAIN, RUNNING), rel=0.2)


@pytest.mark.parametrize("name", ["adaptive", "roofline"])
def test_where_drafts_win_by_much_checks_are_rare(name: str) -> None:
    simulation = Simulation(policy_of(name, WINS.calibration([ARM])))
    rollouts(simulation, WINS, 6)
    after = simulation.run(WINS, constant(RUNNING), 3000)
    assert share(after, PLAIN) < 0.01
    assert speedup(after) > 0.99 * WINS.gain(ARM, RUNNING)


def test_a_check_waits_for_doubt_and_for_steps() -> None:
    costs = CostModel(LOSES.calibration([ARM]))
    check = PlainCheck(costs)
    drafted = outcome(ARM, RUNNING, 24, 8, 1e-3, draft_s=1e-5)
    assert costs.doubt > 0.3
    for _ in range(CHECK_STEPS - 1):
        check.saw(drafted)
    assert not check.due(1.1)
    check.saw(drafted)
    assert check.due(1.1)
    assert not check.due(1.1), "the step may show nothing, as beside prompts: the next check waits all the same"
    for _ in range(CHECK_STEPS):
        check.saw(drafted)
    assert check.due(100.0), "beyond some doubt what is saved is not known either"
    for _ in range(CHECK_STEPS - 1):
        check.saw(drafted)
    check.saw(outcome(PLAIN, RUNNING, 0, 0, 1e-3))
    check.saw(drafted)
    assert not check.due(1.1), "a plain step of any reason is one"


@pytest.mark.parametrize("lag", [0, 1])
def test_a_check_is_seen_with_a_lag_too(lag: int) -> None:
    """On vLLM the next strategy is chosen while a step runs; where it differs, the step's time is not usual."""
    policy = AdaptivePolicy([ARM], costs=CostModel(wrong(LOSES, 2.0)), max_running=64, exploration=0.01, lag=lag)
    chosen = [policy.choose(load(RUNNING))]
    for _ in range(1500):
        chosen.append(policy.choose(load(RUNNING)))
        now, after = chosen[-1 - lag], chosen[-1]
        usual = not lag or now is after
        depth = now.depth
        policy.record(
            outcome(
                now,
                RUNNING,
                RUNNING * depth,
                round(2.2 * RUNNING) if depth else 0,
                LOSES.step_s(now, RUNNING),
                kind=StepKind.USUAL if usual else StepKind.DISTURBED,
                draft_s=LOSES.drafting_s(now),
            )
        )
    assert chosen[-400:].count(PLAIN) > 380
    assert policy.plain_s(load(RUNNING)) == pytest.approx(LOSES.step_s(PLAIN, RUNNING), rel=0.25)


@pytest.mark.parametrize("name", ["adaptive", "roofline"])
def test_evaluations_check_nothing(name: str) -> None:
    policy = policy_of(name, WINS.calibration([ARM]))
    simulation = Simulation(policy)
    rollouts(simulation, WINS, 3)
    simulation.run(WINS, constant(RUNNING), 1, evaluation=True)
    for _ in range(400):
        simulation.run(WINS, constant(RUNNING), 1, evaluation=True)
        assert policy.reason is not Reason.TRIAL
