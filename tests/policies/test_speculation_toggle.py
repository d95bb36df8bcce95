"""Mode roofline: on where the model says that it pays, until the rollout ends; and a ladder that goes up and down."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from config.speculation import RooflineOptions, SpeculationOptions
from config.strategy import PLAIN, Strategy
from policies.calibration.costs import CostModel
from policies.calibration.document import Calibration, CalibrationKey, DraftCost, PassCost
from policies.speculation.build import build_policy
from policies.speculation.check import CHECK_STEPS
from policies.speculation.policy import FixedPolicy, Reason
from policies.speculation.toggle import RooflinePolicy
from policies.steps import Load, StepKind
from tests.policies.loads import load, outcome
from tests.policies.speculation_sim import Simulation, World, arms, constant, long_tail, speedup

LADDER = arms("self:3", "self:5", "self:7", "self:10")
KEY = CalibrationKey(model="m", precision="p", device="d")
# A pass of the copy is a seventh of the target's. Four of five accepted: three drafted tokens pay up to 19 requests.
WORLD = World({"self": 0.8}, fixed_s=1e-3, row_s=60e-6, draft_s={"self": 0.0}, pass_s={"self": 0.15e-3}, noise=0.01)
FREE = replace(WORLD, row_s=1e-6)  # rows that cost nothing


def costs_of(world: World) -> CostModel:
    """Calibrated to the world."""
    passes = [
        PassCost(
            requests=requests,
            rows=requests * rows,
            context_tokens=100 * requests,
            seconds=world.fixed_s + world.row_s * requests * rows,
            count=9,
        )
        for requests in (1, 2, 4, 8, 16, 32, 64)
        for rows in (1, 4, 6, 8, 11)
    ]
    drafts = [
        DraftCost(strategy=str(strategy), requests=requests, seconds=world.drafting_s(strategy), count=9)
        for strategy in LADDER
        for requests in (1, 8, 64)
    ]
    return CostModel(Calibration.measured(KEY, passes, drafts))


def policy_of(world: World | None = WORLD, ladder: Sequence[Strategy] = LADDER, **options: Any) -> RooflinePolicy:
    used = RooflineOptions(**options)
    return RooflinePolicy(
        ladder,
        margin=used.margin,
        near_ceiling=used.near_ceiling,
        patience=used.patience,
        max_running=64,
        costs=None if world is None else costs_of(world),
    )


def rollouts(policy: RooflinePolicy, world: World, count: int, seed: int = 0, *, at: int = -1) -> list[int]:
    """The depth at the end of each rollout that decodes one request, from eight; or at another of its steps."""
    simulation, depths = Simulation(policy, seed), []
    for _ in range(count):
        done = [step for running in (8, 4, 1) for step in simulation.run(world, constant(running), 20)]
        depths.append(done[at].strategy.depth or done[at - 1].strategy.depth)  # one may check the plain price
    return depths


def test_it_is_on_exactly_where_the_predicted_speedup_exceeds_the_margin() -> None:
    for margin in (0.2, 0.4):
        for running in range(1, 65):
            policy = policy_of(margin=margin)
            gain = replace(WORLD, accept={"self": 1.0}).gain(LADDER[0], running)  # every draft accepted, at first
            chosen = policy.choose(load(running))
            if abs(gain - 1 - margin) > 0.05:
                assert (chosen != PLAIN) == (gain > 1 + margin), running
            assert policy.reason == (Reason.PLAIN_IS_FASTER if chosen == PLAIN else Reason.PAYS_MOST)
            assert policy.advantage == pytest.approx(gain, rel=0.06)


def test_once_on_it_stays_on_while_requests_only_leave() -> None:
    policy = policy_of(margin=0.3)
    choices = {running: policy.choose(load(running)) for running in range(64, 0, -1)}
    on = [running for running, chosen in choices.items() if chosen != PLAIN]
    assert on == list(range(max(on), 0, -1))
    assert 2 < max(on) < 40
    # What is measured says that nothing is accepted. A check of the plain price sees it, or the next rollout.
    reasons = []
    for _ in range(200):
        drafts = policy.choose(load(1)) != PLAIN
        reasons.append(policy.reason)
        arm, drafted = (LADDER[0], 3) if drafts else (PLAIN, 0)
        policy.record(outcome(arm, 1, drafted, 0, WORLD.step_s(arm, 1), draft_s=WORLD.drafting_s(arm)))
    checked = reasons.index(Reason.TRIAL)
    assert reasons[:checked] == [Reason.PAYS_MOST] * CHECK_STEPS
    first = reasons.index(Reason.PLAIN_IS_FASTER)
    assert reasons[first - 1] is Reason.TRIAL
    assert set(reasons[first:]) == {Reason.PLAIN_IS_FASTER}
    assert policy.choose(load(2)) == PLAIN


def test_it_decides_anew_when_requests_come() -> None:
    policy = policy_of(margin=0.3)
    assert policy.choose(load(4)) != PLAIN
    assert policy.choose(load(60)) == PLAIN
    assert policy.choose(load(59)) == PLAIN
    assert policy.choose(load(4)) != PLAIN
    assert policy.choose(load(65)) == PLAIN
    assert policy.reason is Reason.TOO_MANY


def test_requests_that_waited_begin_no_rollout() -> None:
    """The ladder judges whole rollouts, not every place that is filled again."""
    policy = policy_of(patience=1)
    for step in range(400):
        running = 2 - step % 2  # one leaves, one of those that waited comes
        policy.choose(Load(running, 5, 100))
        policy.record(outcome(LADDER[0], running, 3 * running, 3 * running, 1.6e-3, draft_s=0.45e-3))
    assert policy.choose(Load(1, 0, 100)) == LADDER[0], "nothing was judged"
    assert policy.choose(Load(2, 0, 100)) == LADDER[1], "now a rollout has ended"


def test_requests_that_come_and_go_within_a_rollout_end_none() -> None:
    """As with turns: 400 steps of one RL step were once 200 rollouts, so the ladder climbed to its end."""
    policy = policy_of(patience=2)
    policy.new_target()
    for rollout in range(3):
        for step in range(400):
            running = 2 - step % 2
            arm = policy.choose(Load(running, 0, 100))
            assert arm == LADDER[rollout // 2] or policy.reason is Reason.TRIAL
            policy.record(outcome(arm, running, arm.depth * running, arm.depth * running, 1.6e-3, draft_s=0.45e-3))
        policy.new_target()


def test_the_ladder_goes_up_where_drafts_are_good_a_rung_in_two_rollouts() -> None:
    world = replace(FREE, accept={"self": 0.99})
    depths = rollouts(policy_of(world), world, 10)
    assert depths[0] == 3
    assert depths[-1] == 10
    rungs = [arm.depth for arm in LADDER]
    changes = [index for index, (before, after) in enumerate(pairwise(depths)) if before != after]
    assert depths == sorted(depths)
    assert all(rungs.index(after) - rungs.index(before) <= 1 for before, after in pairwise(depths))
    assert min(after - before for before, after in pairwise(changes)) >= 2, "patience"


def test_the_ladder_comes_down_again_when_drafts_turn_bad() -> None:
    policy = policy_of(FREE)
    assert rollouts(policy, replace(FREE, accept={"self": 0.99}), 12)[-1] == 10
    depths = rollouts(policy, replace(FREE, accept={"self": 0.6}), 14, seed=1)
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == 10
    assert depths[-1] == 3


def test_a_rung_up_that_costs_more_than_it_brings_is_not_taken() -> None:
    """The ceiling is near on every rung of a drafter that copies the target, however dear its passes are."""
    dear = replace(WORLD, accept={"self": 1.0}, pass_s={"self": 0.95e-3}, row_s=1e-6, fixed_s=1e-3)
    assert dear.gain(LADDER[1], 1) < dear.gain(LADDER[0], 1) * 1.05
    dear = replace(dear, accept={"self": 0.96})
    assert dear.gain(LADDER[1], 1) < dear.gain(LADDER[0], 1)
    assert set(rollouts(policy_of(dear, margin=0.0), dear, 10)) <= {0, 3}


def test_without_a_calibration_it_learns_from_plain_steps() -> None:
    policy = policy_of(None)
    assert policy.choose(load(8)) == PLAIN
    assert policy.reason is Reason.UNMEASURED
    simulation = Simulation(policy)
    world = replace(WORLD, row_s=2e-6)
    simulation.run(world, constant(8), 20)
    done = simulation.run(world, constant(1), 40)
    assert done[-1].strategy in LADDER


def test_it_beats_plain_decoding_and_drafting_always() -> None:
    """Table 2: what the toggle saves is the start of every rollout, where many requests decode."""
    gains = {}
    for name, policy in {"toggle": policy_of(), "always": FixedPolicy(LADDER[0])}.items():
        steps = Simulation(policy).run(WORLD, long_tail(64), 3000)
        gains[name] = speedup(steps)
    assert gains["toggle"] > 1.2
    assert gains["toggle"] > 1.03 * gains["always"]


def test_a_drafter_that_was_bad_once_is_tried_again_some_rollouts_later() -> None:
    bad = replace(FREE, accept={"self": 0.05})
    policy = policy_of(bad)
    depths = rollouts(policy, bad, 12, at=1)
    assert depths[:2] == [3, 0]
    assert 3 in depths[2:]
    assert sum(depth > 0 for depth in depths) <= 6, "these rollouts are short, and soon forgotten"
    assert rollouts(policy, replace(bad, accept={"self": 0.99}), 12, seed=1)[-1] > 0


def test_a_failed_drafter_is_not_chosen_until_it_is_renewed() -> None:
    policy = policy_of()
    policy.unavailable("suffix")
    assert policy.choose(load(1)) == LADDER[0]
    policy.unavailable("self")
    assert policy.choose(load(1)) == PLAIN
    assert policy.reason is Reason.NO_DRAFTER
    policy.renewed("self")
    assert policy.choose(load(1)) == LADDER[0]


def test_evaluations_say_nothing_about_acceptance() -> None:
    policy = policy_of()
    before = policy.efficiency
    policy.choose(load(1))
    for _ in range(100):
        policy.record(outcome(LADDER[0], 1, 3, 0, 1e-3, kind=StepKind.EVALUATION))
    assert policy.efficiency == before == pytest.approx(4.0, rel=1e-4)


def test_the_configuration_makes_one_of_the_copy_of_the_target_or_of_what_is_named() -> None:
    options = SpeculationOptions(mode="roofline", max_running=32)
    built = build_policy(options, ("suffix", "self"), costs=costs_of(WORLD))
    assert isinstance(built, RooflinePolicy)
    assert {arm.drafter for arm in built.arms_at(1)} == {"self"}
    assert not built.arms_at(33)
    named = SpeculationOptions(mode="roofline", strategies=("plain", "suffix:8", "suffix:4"))
    built = build_policy(named, ("suffix", "self"))
    assert built is not None
    assert [arm.depth for arm in built.arms_at(1)] == [4, 8]
    assert built.max_nodes == 8
    assert build_policy(SpeculationOptions(mode="roofline"), ()) is None
    for wrong in (("suffix:4", "self:3"), ("suffix:4x2/6",), ("plain",)):
        with pytest.raises(ValueError, match=r"rollout\.speculation\.mode: roofline"):
            build_policy(SpeculationOptions(mode="roofline", strategies=wrong), ("suffix", "self"))
