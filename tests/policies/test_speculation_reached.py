"""A drafter that pays is used: early, at every batch size it is meant for, and while it is trained on.

Worlds with the costs of a GPU: a plain step takes 6 ms, a row 28 us, a network's pass 0.35 ms, and switching it on
costs about a pass over what it has missed. RL steps are waves of requests with long-tailed lengths up to 2,048 tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from config.speculation import SpeculationOptions
from config.strategy import PLAIN
from policies.speculation.build import build_policy
from policies.speculation.chooser import AdaptivePolicy
from tests.params import long
from tests.policies.speculation_sim import Running, Simulation, Step, World, bound_share, constant, long_tail

GPU = World(
    {"eagle": 0.75, "suffix": 0.35, "ngram": 0.25},
    fixed_s=6e-3,
    row_s=28e-6,
    draft_s={"eagle": 0.1e-3, "suffix": 0.05e-3, "ngram": 0.05e-3},
    pass_s={"eagle": 0.35e-3},
    catch_up_s={"eagle": 0.5e-3},
    catch_up_row_s=3e-6,
)
SLOW_TO_START = replace(GPU, catch_up_row_s=60e-6)  # a CPU's: as dear per row as a pass of the target
DRAFTERS = ("ngram", "suffix", "eagle")
LONGEST = 2048
REQUESTS = (1, 2, 4, 8, 16, 32, 64)
BETWEEN = [pytest.param(*of, marks=pytest.mark.long) for of in ((2, 2), (4, 2), (16, 3), (64, 2))]


def adaptive(max_running: int = 32, **options: float) -> AdaptivePolicy:
    policy = build_policy(SpeculationOptions(max_running=max_running, **options), DRAFTERS)
    assert isinstance(policy, AdaptivePolicy)
    return policy


def waves(requests: int) -> Running:
    return long_tail(requests, middle=300.0, longest=LONGEST)


def rl_steps(
    simulation: Simulation, world: World, running: Running, count: int, *, renew: bool = True
) -> list[list[Step]]:
    """Each decodes LONGEST tokens per request; new drafter weights come with every one, as the spot trainer's do."""
    done = []
    for _ in range(count):
        steps: list[Step] = []
        end = (simulation.tokens // LONGEST + 1) * LONGEST
        while simulation.tokens < end:
            steps += simulation.run(world, running, 1)
        if renew:
            simulation.policy.renewed("eagle")
        done.append(steps)
    return done


def worth_it(policy: AdaptivePolicy, steps: Sequence[Step]) -> list[Step]:
    """The steps in which EAGLE is the best that could be chosen."""
    return [step for step in steps if step.world.best(policy.arms_at(step.running), step.running).drafter == "eagle"]


def share_of_eagle(steps: Sequence[Step]) -> float:
    return sum(step.strategy.drafter == "eagle" for step in steps) / max(len(steps), 1)


@pytest.mark.parametrize("world", [GPU, SLOW_TO_START], ids=["gpu", "slow to start"])
@pytest.mark.parametrize(("requests", "rl_step"), [(1, 4), (8, 2), (32, 3), *BETWEEN])
def test_a_network_that_pays_is_soon_in_use(world: World, requests: int, rl_step: int) -> None:
    """By the second or third RL step; one request alone decodes so little that 1 % of it pays few trials: by the
    fourth."""
    for seed in range(3):
        simulation = Simulation(adaptive(), seed)
        done = rl_steps(simulation, world, waves(requests), 5)
        paying = worth_it(simulation.policy, done[rl_step - 1])
        assert paying
        assert share_of_eagle(paying) >= 0.5
        assert bound_share(done[4], simulation.policy.arms_at) >= 0.9


@pytest.mark.parametrize("running", REQUESTS)
def test_it_is_found_at_every_batch_size_where_nothing_else_changes(running: int) -> None:
    """The batch stays: no cheaper size teaches what a dearer one costs."""
    simulation = Simulation(adaptive(max_running=64), 1)
    done = rl_steps(simulation, GPU, constant(running), 5)
    assert share_of_eagle(done[1]) >= 0.5
    assert bound_share(done[4], simulation.policy.arms_at) >= 0.9


@pytest.mark.parametrize("requests", [1, 16, *long(2, 4, 8, 32, 64)])
def test_new_weights_in_every_rl_step_cost_little_of_what_is_reachable(requests: int) -> None:
    renewed, kept = (
        [
            bound_share(steps, simulation.policy.arms_at)
            for steps in rl_steps(simulation, GPU, waves(requests), 15, renew=renew)
        ]
        for renew in (True, False)
        for simulation in [Simulation(adaptive(), 2)]
    )
    assert sum(renewed[10:]) >= 0.95 * sum(kept[10:])


def test_a_dear_switch_keeps_it_from_no_batch_size_though_weights_are_always_new() -> None:
    """Dear sizes are rare in a tail: what cheap ones taught holds there."""
    simulation = Simulation(adaptive(), 3)
    done = rl_steps(simulation, GPU, waves(64), 6)
    steps = worth_it(simulation.policy, [step for steps in done[2:] for step in steps])
    for running in {step.running for step in steps}:
        assert share_of_eagle([step for step in steps if step.running == running]) >= 0.5, running


def test_a_network_that_becomes_good_is_taken_up() -> None:
    """It begins as random weights do, and is trained while the run goes on."""
    bad = replace(GPU, accept={**GPU.accept, "eagle": 0.05})
    simulation = Simulation(adaptive(), 0)
    rl_steps(simulation, bad, waves(32), 3)
    done = rl_steps(simulation, GPU, waves(32), 4)
    assert share_of_eagle(worth_it(simulation.policy, done[2])) >= 0.5
    assert bound_share(done[3], simulation.policy.arms_at) >= 0.85


@pytest.mark.parametrize("requests", [1, 8, 64])
@pytest.mark.parametrize("eagle", [0.0, 0.1])
def test_first_looks_at_a_network_that_is_worth_nothing_cost_next_to_nothing(requests: int, eagle: float) -> None:
    useless = replace(SLOW_TO_START, accept={"eagle": eagle})
    simulation = Simulation(adaptive(), 0)
    steps = [step for done in rl_steps(simulation, useless, waves(requests), 2) for step in done]
    plain_s = sum(useless.step_s(PLAIN, step.running) for step in steps)
    spent_s = sum(useless.step_s(step.strategy, step.running) + step.switched_on_s for step in steps)
    gained_s = sum(useless.step_s(PLAIN, step.running) * step.accepted / step.running for step in steps)
    assert spent_s - gained_s <= 1.04 * plain_s


@pytest.mark.parametrize("policy", [adaptive, lambda: adaptive(exploration=0.03)], ids=["0.01", "0.03"])
def test_a_small_target_on_a_cpu_uses_its_network_too(policy: Callable[[], AdaptivePolicy]) -> None:
    cpu = World(
        {"eagle": 0.75, "suffix": 0.35, "ngram": 0.25},
        fixed_s=2e-3,
        row_s=0.35e-3,
        pass_s={"eagle": 0.15e-3},
        catch_up_s={"eagle": 0.2e-3},
        catch_up_row_s=20e-6,
    )
    simulation = Simulation(policy(), 0)
    done = rl_steps(simulation, cpu, waves(16), 5)
    assert share_of_eagle(worth_it(simulation.policy, done[1])) >= 0.5
    assert bound_share(done[4], simulation.policy.arms_at) >= 0.9
