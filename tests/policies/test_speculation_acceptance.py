"""The acceptance model against drafters whose acceptance is known: what is learned, how soon, for how long."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.strategy import Strategy
from policies.speculation.acceptance import DOUBT, MEMORY, PROBLEMS, AcceptanceModel
from policies.steps import Int64Array, Load, StepKind, StepOutcome
from tests.policies.speculation_sim import World, arms

NOBODY = np.zeros(0, np.int64)
CHAINS = arms("suffix:8", "suffix:2", "suffix:16")


def step(
    strategy: Strategy,
    reached: Sequence[int] | Int64Array,
    stood: Sequence[int] | Int64Array,
    prompt_ids: Int64Array = NOBODY,
) -> StepOutcome:
    reached, stood = np.asarray(reached, np.int64), np.asarray(stood, np.int64)
    return StepOutcome(
        kind=StepKind.USUAL,
        strategy=strategy,
        load=Load(len(reached), 0, 100, prompt_ids),
        prompt_tokens=0,
        drafted=int((reached * strategy.tokens_to_verify // strategy.depth).sum()),
        accepted=int(stood.sum()),
        elapsed_s=1e-3,
        draft_s=1e-5,
        prompt_ids=prompt_ids if len(prompt_ids) else None,
        reached=reached,
        stood=stood,
    )


def taught(
    model: AcceptanceModel, world: World, strategy: Strategy, prompt_ids: Int64Array, steps: int, seed: int = 0
) -> AcceptanceModel:
    draw = np.random.default_rng(seed)
    for _ in range(steps):
        model.learn(strategy, [step(strategy, *world.drafts(strategy, prompt_ids, draw), prompt_ids)])
    return model


def accepted(model: AcceptanceModel, chosen: Sequence[Strategy], prompt_ids: Int64Array = NOBODY) -> dict[str, float]:
    return {str(arm): float(a) for arm, a in zip(chosen, model.expected(prompt_ids).accepted, strict=True)}


@pytest.mark.parametrize(("rate", "says"), [(0.9, 1.0), (0.6, 0.4), (0.0, 1.0), (0.97, 0.1)])
def test_what_every_depth_brings_is_learned_from_one(rate: float, says: float) -> None:
    """Of depth 8: the shallower is part of it, the deeper goes on as it does."""
    world = World({"suffix": rate}, says={"suffix": says})
    model = taught(AcceptanceModel(CHAINS), world, CHAINS[0], np.zeros(64, np.int64), 40)
    expected = model.expected(NOBODY)
    for arm, brings, rows in zip(CHAINS, expected.accepted, expected.rows, strict=True):
        true = says * sum(rate**depth for depth in range(1, arm.depth + 1))
        assert brings == pytest.approx(true, rel=0.2, abs=0.05), arm
        assert rows == pytest.approx(says * arm.depth, rel=0.15), arm


def test_drafts_that_were_not_made_say_nothing_of_those_that_are() -> None:
    """A drafter that speaks at every tenth step and is right is, where it speaks, as good as any."""
    model = AcceptanceModel(CHAINS)
    for _ in range(40):
        model.learn(CHAINS[0], [step(CHAINS[0], [8] + [0] * 9, [8] + [0] * 9)])
    drafted, stands = model.survival(CHAINS[0], np.zeros(1, np.int64))
    assert drafted[0, 0] == pytest.approx(0.1, abs=0.02)
    assert stands[0] / drafted[0] == pytest.approx(np.ones(8), abs=0.25)


def test_a_step_without_any_draft_says_that_it_had_nothing_to_say() -> None:
    model = AcceptanceModel(CHAINS)
    silent = StepOutcome(
        kind=StepKind.USUAL,
        strategy=CHAINS[0],
        load=Load(4, 0, 100),
        prompt_tokens=0,
        drafted=0,
        accepted=0,
        elapsed_s=1e-3,
        draft_s=1e-5,
    )
    for _ in range(50):
        model.learn(CHAINS[0], [silent])
    assert model.expected(NOBODY).rows.max() < 0.05
    assert model.seen(CHAINS[1]) == pytest.approx(200, rel=0.2)


def test_what_a_budget_cuts_says_nothing_of_what_would_have_come() -> None:
    cut, free = AcceptanceModel(CHAINS), AcceptanceModel(CHAINS)
    for _ in range(30):
        free.learn(CHAINS[0], [step(CHAINS[0], [2] * 8, [2] * 8)])
        cut.learn(CHAINS[0], [replace(step(CHAINS[0], [2] * 8, [2] * 8), room=np.full(8, 2))])
    assert accepted(free, CHAINS)["suffix:8"] == pytest.approx(2, rel=0.1)
    assert accepted(cut, CHAINS)["suffix:8"] > 6
    nothing = replace(step(CHAINS[0], [0] * 8, [0] * 8), room=np.zeros(8, np.int64), reached=None, stood=None)
    before = cut.expected(NOBODY).accepted
    cut.learn(CHAINS[0], [nothing])
    assert cut.expected(NOBODY).accepted == pytest.approx(before, rel=0.05)


def test_a_tree_begins_where_the_chain_is_and_then_follows_its_own() -> None:
    chosen = arms("eagle:4", "eagle:4x3/12")
    model = taught(AcceptanceModel(chosen), World({"eagle": 0.5}), chosen[0], np.zeros(16, np.int64), 60)
    before = accepted(model, chosen)
    assert before["eagle:4x3/12"] == pytest.approx(before["eagle:4"], rel=0.01)
    assert model.expected(NOBODY).rows[1] == pytest.approx(12, rel=0.01)
    taught(model, World({"eagle": 0.9}), chosen[1], np.zeros(16, np.int64), 60)
    after = accepted(model, chosen)
    assert after["eagle:4x3/12"] > 1.4 * after["eagle:4"]
    assert after["eagle:4"] == pytest.approx(before["eagle:4"], rel=0.05), "the chain learns nothing of its tree"


def test_before_anything_is_seen_a_copy_of_the_target_is_trusted_and_a_retriever_is_not() -> None:
    chosen = arms("self:5", "suffix:5", "stranger:5")
    found = accepted(AcceptanceModel(chosen), chosen)
    assert found["self:5"] > 4
    assert found["suffix:5"] == found["stranger:5"] < 0.5
    assert accepted(AcceptanceModel(chosen, {"suffix": 0.9}), chosen)["suffix:5"] > found["suffix:5"]


def test_a_few_drafts_outweigh_what_was_expected() -> None:
    chosen = arms("self:5")
    model = AcceptanceModel(chosen)
    model.learn(chosen[0], [step(chosen[0], [5] * 16, [0] * 16)])
    assert accepted(model, chosen)["self:5"] < 0.3


def test_hope_shrinks_with_what_was_seen_and_grows_back_while_nothing_is() -> None:
    hopes = []
    model = AcceptanceModel(CHAINS)
    for _ in range(6):
        hopes.append(float(model.expected(NOBODY).hoped[1]))
        model.learn(CHAINS[1], [step(CHAINS[1], [2] * 8, [0] * 8)])
    assert all(later < earlier for earlier, later in pairwise(hopes))
    low = float(model.expected(NOBODY).hoped[1])
    assert low < 0.25
    model.passed(int(4 * DOUBT))
    assert float(model.expected(NOBODY).hoped[1]) > 3 * low


def test_a_drafter_that_knows_more_texts_is_hoped_of_again_and_expected_as_it_was() -> None:
    """One trial settles it: of what it says now."""
    model = AcceptanceModel(CHAINS)
    nothing = step(CHAINS[0], [0] * 32, [0] * 32)
    model.learn(CHAINS[0], [nothing])
    before = model.expected(NOBODY)
    assert before.hoped[0] < 0.5, "it was tried while it knew nothing"
    model.grown("suffix")
    grown = model.expected(NOBODY)
    assert grown.hoped[0] > 4
    assert grown.accepted.tolist() == before.accepted.tolist()
    assert grown.rows.tolist() == before.rows.tolist()
    model.learn(CHAINS[0], [nothing])
    assert model.expected(NOBODY).hoped[0] < 0.5
    model.grown("suffix")
    model.grown("another")
    model.learn(CHAINS[0], [step(CHAINS[0], [8] * 32, [8] * 32)] * 4)
    assert model.expected(NOBODY).accepted[0] > before.accepted[0] + 2


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9)])
def test_change_is_followed(before: float, after: float) -> None:
    model, everyone = AcceptanceModel(CHAINS), np.zeros(8, np.int64)
    taught(model, World({"suffix": before}), CHAINS[0], everyone, 1000)
    taught(model, World({"suffix": after}), CHAINS[0], everyone, 4 * int(MEMORY) // 8)
    true = sum(after**depth for depth in range(1, 9))
    assert accepted(model, CHAINS)["suffix:8"] == pytest.approx(true, rel=0.25, abs=0.3)


def test_new_weights_are_believed_within_some_dozens_of_drafts_and_begin_where_the_old_ones_were() -> None:
    model, everyone = AcceptanceModel(CHAINS), np.zeros(8, np.int64)
    taught(model, World({"suffix": 0.9}), CHAINS[0], everyone, 1000)
    before = accepted(model, CHAINS)["suffix:8"]
    model.renewed("suffix")
    model.renewed("nobody")
    assert accepted(model, CHAINS)["suffix:8"] == pytest.approx(before, rel=0.2)
    taught(model, World(), CHAINS[0], everyone, 16)
    assert accepted(model, CHAINS)["suffix:8"] < before / 4


def test_problems_differ_and_one_hardly_seen_is_the_pools() -> None:
    world = World({"suffix": 0.9}, problems={1: 1.0, 2: 0.3})
    model = AcceptanceModel(CHAINS)
    taught(model, world, CHAINS[0], np.array([1, 2] * 4), 60)
    one, two, other = (accepted(model, CHAINS, np.array([problem]))["suffix:8"] for problem in (1, 2, 3))
    true = [sum(rate**depth for depth in range(1, 9)) for rate in (0.9, 0.27)]
    assert one == pytest.approx(true[0], rel=0.25)
    assert two == pytest.approx(true[1], rel=0.4)
    assert two < other < one
    assert other == pytest.approx(accepted(model, CHAINS)["suffix:8"])
    together = accepted(model, CHAINS, np.array([1, 2, 2, 2]))["suffix:8"]
    assert together == pytest.approx((one + 3 * two) / 4)
    drafted, stands = model.survival(CHAINS[0], np.array([1, 2, 1]))
    assert drafted.shape == stands.shape == (3, 8)
    assert stands.sum(1) == pytest.approx([one, two, one])
    assert (np.diff(stands) <= 1e-12).all()
    assert (stands <= drafted + 1e-9).all()


def test_a_pool_of_equals_has_no_problem_that_stands_out() -> None:
    """What ended is compared with how many of the pool's would have: equal drafters stay equal at any rate."""
    for rate in (0.0, 0.3, 0.95):
        model = taught(AcceptanceModel(CHAINS), World({"suffix": rate}), CHAINS[0], np.arange(1, 9), 300)
        pool = accepted(model, CHAINS)["suffix:8"]
        for problem in range(1, 9):
            assert accepted(model, CHAINS, np.array([problem]))["suffix:8"] == pytest.approx(pool, rel=0.3, abs=0.05)


def test_the_problem_not_seen_for_longest_is_forgotten() -> None:
    model = AcceptanceModel(CHAINS)
    taught(model, World({"suffix": 0.9}, problems={0: 0.0}), CHAINS[0], np.arange(0, 8), 20)
    low = accepted(model, CHAINS, np.array([0]))["suffix:8"]
    assert low < 0.7 * accepted(model, CHAINS)["suffix:8"]
    for first in range(100, 100 + 2 * PROBLEMS, 64):
        model.expected(np.arange(first, first + 64))
    assert accepted(model, CHAINS, np.array([0]))["suffix:8"] == pytest.approx(accepted(model, CHAINS)["suffix:8"])


levels = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 5)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(levels, st.sampled_from(("suffix:8", "suffix:2", "suffix:12x2/16", "nobody:3")), st.booleans()))
)
def test_whatever_is_verified_what_is_expected_makes_sense(
    steps: list[tuple[list[tuple[int, int, int]], str, bool]],
) -> None:
    chosen = arms("suffix:8", "suffix:2", "suffix:12x2/16", "ngram:4")
    model = AcceptanceModel(chosen)
    for requests, text, own in steps:
        strategy = Strategy.parse(text)
        reached = [min(r, strategy.depth) for r, _, _ in requests]
        stood = [min(r, s) for r, (_, s, _) in zip(reached, requests, strict=True)]
        problems = np.array([problem for _, _, problem in requests]) if own else NOBODY
        model.learn(strategy, [step(strategy, reached, stood, problems)])
    for problems in (NOBODY, np.array([0, 3, 3])):
        expected = model.expected(problems)
        for arm, brings, hoped, rows in zip(chosen, expected.accepted, expected.hoped, expected.rows, strict=True):
            assert 0 <= brings <= hoped + 1e-9 <= arm.depth + 1e-6
            assert 0 <= rows <= arm.tokens_to_verify + 1e-6 or arm.is_tree
        assert expected.accepted[1] <= expected.accepted[0] + 1e-9, "deeper brings no less"
