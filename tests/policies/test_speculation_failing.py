"""The adaptive choice where drafters fail or are not worth it."""

from statistics import fmean

from config.strategy import PLAIN
from policies.speculation.defaults import default_arms
from tests.policies.loads import load, outcome
from tests.policies.speculation_sim import (
    Simulation,
    World,
    arms,
    constant,
    long_tail,
    share,
    speedup,
)
from tests.policies.test_speculation_chooser import DEEP, DEFAULT, SEEDS, build, simulate

# Drafters that fail, or are not worth it.


def test_an_unavailable_drafter_is_replaced_at_once() -> None:
    chosen, gains = arms("suffix:8", "ngram:8"), []
    for seed in range(6):
        simulation = simulate(seed, chosen)
        simulation.run(DEEP, constant(1), 3000)
        assert simulation.policy.choose(load(1)) in (chosen[0], PLAIN)
        simulation.policy.unavailable("suffix")
        simulation.policy.record(outcome(chosen[0], 1, 8, 8, 1e-9))  # the step in which it failed
        after = simulation.run(DEEP, constant(1), 3000)
        assert share(after, chosen[0]) == 0
        gains.append(speedup(after[1000:]))
        assert list(simulation.policy.arms_at(1)) == [chosen[1]]
        simulation.policy.unavailable("ngram")
        assert share(simulation.run(DEEP, constant(1), 500), PLAIN) == 1
    assert DEEP.gain(chosen[1], 1) < 1.09
    assert fmean(gains) > 1.05


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
