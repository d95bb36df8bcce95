"""What the adaptive chooser learns from, and what it is not made to pay for: evaluations, late arms, copies."""

import pickle
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from config.strategy import PLAIN, Strategy
from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.policy import Reason
from policies.steps import Load, StepKind
from tests.policies.loads import load, outcome
from tests.policies.speculation_sim import (
    Step,
    World,
    arms,
    constant,
    speedup,
)
from tests.policies.test_speculation_chooser import (
    DEEP,
    DEFAULT,
    SEEDS,
    build,
    simulate,
)


def test_nothing_measured_is_nothing_chosen() -> None:
    policy = build()
    for _ in range(300):
        policy.record(outcome(policy.choose(load(4)), 4, 0, 0, 1e-3, kind=StepKind.DISTURBED))
    assert policy.choose(load(4)) == PLAIN
    assert policy.plain_s(load(4)) is None


def test_an_evaluation_is_decoded_with_the_best_arm_and_teaches_no_acceptance() -> None:
    for seed in SEEDS:
        simulation = simulate(seed, exploration=0.2)
        simulation.run(DEEP, constant(1), 3000)
        policy = simulation.policy
        assert isinstance(policy, AdaptivePolicy)
        simulation.run(World(), constant(1), 1000, evaluation=True)  # the hold of before ends
        before = policy.acceptance.expected(np.zeros(1, np.int64))
        steps = simulation.run(World(), constant(1), 2000, evaluation=True)
        after = policy.acceptance.expected(np.zeros(1, np.int64))
        assert (after.accepted == before.accepted).all()
        assert len({step.strategy for step in steps}) == 1, "and nothing is tried"
        assert DEEP.gain(steps[0].strategy, 1) >= 0.9 * DEEP.gain(DEEP.best(policy.arms_at(1), 1), 1)


def test_an_arm_that_is_used_a_step_after_its_choice_is_learned_all_the_same() -> None:
    policy, chosen = build(arms("suffix:8", "ngram:8"), DEEP, lag=1), [PLAIN]
    draw = np.random.default_rng(0)
    for _ in range(2000):
        chosen.append(policy.choose(load(2)))
        ran = chosen[-2]
        reached, stood = DEEP.drafts(ran, np.zeros(2, np.int64), draw)
        step = outcome(ran, 2, int(reached.sum()), int(stood.sum()), DEEP.step_s(ran, 2), draft_s=DEEP.drafting_s(ran))
        policy.record(replace(step, reached=reached, stood=stood) if ran.depth else step)
    assert chosen[-500:].count(Strategy.parse("suffix:8")) >= 450


@pytest.mark.parametrize("running", [8, 40])
def test_memory_does_not_grow_with_steps(running: int) -> None:
    simulation = simulate(0)
    simulation.run(DEEP, constant(running), 5000)
    before = len(pickle.dumps(simulation.policy))
    simulation.run(DEEP, constant(running), 20_000)
    assert len(pickle.dumps(simulation.policy)) < 1.2 * before


# A copy of the target, which is made anew for every update.

COPY = World(
    {"self": 0.95, "suffix": 0.4},
    fixed_s=20e-3,
    row_s=2.5e-3,
    draft_s={"suffix": 0.3e-3, "self": 0.1e-3},
    pass_s={"self": 6e-3},
    prepare_s={"self": 0.25},
)
COPIED = (*DEFAULT, *arms("self:3", "self:5", "self:7"))


def updates(number: int, steps: int, running: int, seed: int = 0) -> list[Step]:
    """Of a first run without calibration: `steps` of so many requests for each of the target's weights."""
    simulation, done = simulate(seed, COPIED), []
    for _ in range(number):
        simulation.new_target()
        done += simulation.run(COPY, constant(running), steps)
    return done


def test_a_copy_whose_preparation_cannot_be_earned_back_is_made_once_at_most() -> None:
    """Eight steps for each of the weights bring less than the ten that making it takes."""
    for seed in SEEDS:
        steps = updates(30, 8, 1, seed)
        assert sum(step.switched_on_s > 0 for step in steps) <= 1
        assert speedup(steps) >= 0.97


def test_one_that_earns_it_back_is_made_in_a_first_run() -> None:
    """Weights serve 300 steps, of which a copy saves half. It is first made once decoding was 67 times as long.
    Then it drafts until the cost of its drafts is seen, even if to make it took much longer than expected."""
    for seed in (*SEEDS, 3, 5):
        steps = updates(10, 300, 1, seed)
        assert share_of(steps[1500:], "self") >= 0.95
        assert speedup(steps[1500:]) >= 1.4


def test_at_many_requests_where_it_loses_it_is_never_made() -> None:
    for seed in SEEDS:
        steps = updates(6, 60, 32, seed)
        assert share_of(steps, "self") == 0
        assert speedup(steps) >= 0.985


def share_of(steps: Sequence[Step], drafter: str) -> float:
    return sum(step.strategy.drafter == drafter for step in steps) / len(steps)


def test_prompts_alone_do_not_tell_what_a_pass_takes() -> None:
    """But what many rows cost: the first step that decodes after them is plain, and no draft of many rows follows."""
    policy = build(COPIED)
    prompts = replace(outcome(PLAIN, 1, 0, 0, 0.45, kind=StepKind.DISTURBED, prompt_tokens=180), load=Load(0, 0, 0))
    policy.record(prompts)
    assert policy.choose(load(32)) == PLAIN
    assert policy.reason is Reason.UNMEASURED
    policy.record(outcome(PLAIN, 32, 0, 0, 0.1))
    assert policy.choose(load(32)).depth <= 2
