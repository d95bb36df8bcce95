"""Virtual rollouts cost what was measured, and the drafts in them are those of the drafter."""

import numpy as np
import pytest

from benchmarks.tools.decode_sweep import Cell, Sweep
from benchmarks.tools.suffix_data import Problem
from benchmarks.tools.virtual_rollout import DEPTH, Lengths, Replays, SweepCosts, draw, plain_s, rollout
from experiments.draft_budgets import Acceptance, Adaptive, Aware, Knowing, Oracle, Unlimited, figure_8, optimum
from policies.speculation.length_aware import LengthAwareBudget
from policies.steps import Load
from tests.native import needs_native

BATCHES, CONTEXTS, DRAFTS = (1, 4, 16, 64), (256, 1024, 4096), (3, 7, 15)
LENGTHS = Lengths(median=150, cap=600, between=0.5, within=0.4)


def pass_s(batch: int, context: int, rows: int) -> float:
    return 9e-3 + 50e-6 * batch * rows + 1e-9 * batch * context


def sweep() -> Sweep:
    found = Sweep("made up")
    for batch in BATCHES:
        for context in CONTEXTS:
            found.decoding[batch, context] = pass_s(batch, context, 1)
            for length in DRAFTS:
                found.verification[Cell(batch, context, length)] = pass_s(batch, context, 1 + length)
    return found


@pytest.fixture(scope="module")
def replays() -> Replays:
    """Responses that share much of their text with others of their problem."""
    rng, problems = np.random.default_rng(0), []
    for _ in range(12):
        base = rng.integers(1, 50, 120).astype(np.int32)
        samples = [np.where(rng.random(120) < 0.1, rng.integers(1, 50, 120), base).astype(np.int32) for _ in range(4)]
        problems.append(Problem(rng.integers(1, 50, 10).astype(np.int32), samples))
    return Replays.of(problems)


def test_passes_cost_what_was_measured_and_in_between_what_lies_between() -> None:
    costs = SweepCosts(sweep())
    for batch in BATCHES:
        for context in CONTEXTS:
            for length in (0, *DRAFTS):
                found = costs.step_s(batch, batch * (1 + length), batch * context)
                assert found == pytest.approx(pass_s(batch, context, 1 + length))
    assert costs.step_s(10, 23, 10 * 1024) == pytest.approx(9e-3 + 50e-6 * 23 + 1e-9 * 10 * 1024)
    assert costs.step_s(128, 512, 128 * 1024) == pytest.approx(9e-3 + 50e-6 * 512 + 1e-9 * 128 * 1024)
    assert figure_8(*costs.passes())["mean_relative_error"] < 0.02


def test_a_cell_that_was_not_measured_grows_as_the_shorter_context_does() -> None:
    found = sweep()
    del found.verification[Cell(64, 4096, 15)]
    assert SweepCosts(found).step_s(64, 64 * 16, 64 * 4096) == pytest.approx(pass_s(64, 4096, 16), rel=0.02)


@needs_native
def test_plain_decoding_in_closed_form_is_what_step_by_step_takes(replays: Replays) -> None:
    class Plain(Unlimited):
        def depths(self, load: Load, *_: object) -> None:
            return None

    costs = SweepCosts(sweep())
    for slots in (32, 8):
        requests = draw(replays, LENGTHS, 3, 10, 32)
        found = rollout(replays, requests, costs, Plain(), cap=600, slots=slots)
        assert plain_s(requests, costs, slots=slots) == pytest.approx(found.seconds, rel=0.01)
        assert found.rows == found.tokens == int(requests.lengths.sum())


@needs_native
def test_every_policy_writes_the_same_tokens_and_drafts_within_its_depth(replays: Replays) -> None:
    costs, acceptance = SweepCosts(sweep()), Acceptance(replays)
    adaptive = Adaptive(costs, acceptance)
    aware = Aware(LengthAwareBudget(costs, acceptance, 32), adaptive, capped=False)
    known = Oracle(Knowing(costs, acceptance, 32), adaptive, 32)
    seconds: dict[str, float] = {}
    for step in range(12):
        requests = draw(replays, LENGTHS, step, 12, 32)
        for policy in (Unlimited(), adaptive, aware, known):
            found = rollout(replays, requests, costs, policy, cap=600, slots=32)
            assert found.rows - found.drafted + found.accepted == found.tokens
            name = type(policy).__name__
            seconds[name] = seconds.get(name, 0.0) + found.seconds
    assert seconds["Oracle"] < 0.99 * seconds["Adaptive"]
    assert seconds["Adaptive"] < seconds["Unlimited"]
    assert seconds["Aware"] < 1.02 * seconds["Adaptive"]


@needs_native
def test_acceptance_is_that_of_the_replays(replays: Replays) -> None:
    drafted, accepted = replays.survival(pool_tokens=0.0)
    assert drafted.shape == accepted.shape == (13, DEPTH)
    assert (accepted <= drafted).all()
    assert drafted[-1, 4] == pytest.approx((replays.offered >= 5).mean())
    assert accepted[0, 2] == pytest.approx((replays.stood[: int(replays.lengths[0].sum())] >= 3).mean())


def test_the_idealised_world_says_what_each_objective_loses() -> None:
    found = optimum(40)
    assert all(of["mean"] >= -1e-6 for of in found.values())
    assert found["ours"]["mean"] < found["equal prices"]["mean"] < found["no drafts"]["mean"]
