"""The elastic switch: off above its threshold, on again only when clearly fewer run; and policies obey it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.strategy import PLAIN
from policies.speculation.bandit import BegMabPolicy
from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.elastic import ElasticSwitch
from policies.speculation.policy import FixedPolicy, Reason, StrategyPolicy
from tests.policies.loads import load
from tests.policies.speculation_sim import Simulation, World, arms, constant

ARMS = arms("suffix:8", "suffix:4")


@given(st.integers(1, 256), st.lists(st.integers(1, 300), max_size=60))
def test_state_is_a_function_of_the_threshold_and_the_last_state(threshold: int, batches: list[int]) -> None:
    switch, on = ElasticSwitch(threshold), True
    for running in batches:
        if running > threshold:
            on = False
        elif running <= -(-threshold * 7 // 8):  # seven eighths, rounded up
            on = True
        assert switch.on(running) == on


def test_a_batch_around_the_threshold_switches_once() -> None:
    switch = ElasticSwitch(32)
    assert [switch.on(running) for running in (31, 32, 33, 32, 33, 32, 31, 30, 29)] == [True, True] + [False] * 7
    assert [switch.on(running) for running in (28, 29, 32, 33, 28)] == [True, True, True, False, True]


def test_one_request_is_a_threshold() -> None:
    switch = ElasticSwitch(1)
    assert [switch.on(running) for running in (1, 2, 1)] == [True, False, True]


def adaptive() -> StrategyPolicy:
    return AdaptivePolicy(ARMS, max_running=32, exploration=0.01)


def paper() -> StrategyPolicy:
    return BegMabPolicy(ARMS, thresholds=None, epsilon=0.1, window=32, max_running=32, seed=0)


@pytest.mark.parametrize("policy", [adaptive(), paper()], ids=["adaptive", "paper"])
def test_policies_switch_off_and_on_again(policy: StrategyPolicy) -> None:
    """The adaptive one knows what switching costs: it needs no hysteresis."""
    world, simulation = World({"suffix": 0.95}, row_s=1e-6, noise=0.0), Simulation(policy)
    simulation.run(world, constant(8), 2000)

    def speculating(running: int) -> float:
        return sum(step.strategy != PLAIN for step in simulation.run(world, constant(running), 200)) / 200

    assert speculating(8) > 0.8
    assert speculating(33) == speculating(64) == 0
    if isinstance(policy, BegMabPolicy):
        assert speculating(32) == speculating(29) == 0
    assert speculating(28) > 0.5
    assert speculating(32) > 0.5  # coming from below, the threshold itself still speculates
    reasons = [(policy.choose(load(running)), policy.reason)[1] for running in (32, 33)]
    assert reasons[0] is not Reason.TOO_MANY
    assert reasons[1] is Reason.TOO_MANY
    assert list(policy.arms_at(33)) == []
    assert all(policy.arms_at(running) for running in (1, 8, 32))


def test_a_fixed_strategy_stops_above_its_threshold() -> None:
    policy = FixedPolicy(ARMS[0], max_running=16)
    chosen = [(policy.choose(load(running)), policy.reason) for running in (16, 17, 16)]
    assert chosen == [(ARMS[0], Reason.FIXED), (PLAIN, Reason.TOO_MANY), (ARMS[0], Reason.FIXED)]
    assert policy.arms_at(16) == (ARMS[0],)
    assert policy.arms_at(17) == ()
