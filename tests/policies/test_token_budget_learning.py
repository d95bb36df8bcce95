"""What a budget remembers of prompts: spread with a pool that it fades back to, and costs that move with the policy."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.token_budget.cost import ExpectedLengths, Visit
from policies.token_budget.keep import LateModel
from policies.token_budget.spread import RETAINED, SpreadModel, squares, visit_variance


def plain(prompt: int, tokens: list[int]) -> Visit:
    return Visit(prompt, tokens, [1.0] * len(tokens), [False] * len(tokens))


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=40))
def test_of_equal_sizes_the_spread_of_a_visit_is_the_unbiased_variance(rewards: list[float]) -> None:
    plain = visit_variance(squares(rewards))
    assert plain == pytest.approx(float(np.var(rewards, ddof=1)), abs=1e-12)
    assert visit_variance(squares(rewards), [1.0] * len(rewards)) == plain
    assert visit_variance(squares(rewards, [7.0] * len(rewards))) == pytest.approx(7 * plain)


@pytest.mark.parametrize("keep", [0.1, 0.5, 1.0])
def test_late_responses_that_are_solved_later_count_alike_with_any_probability(keep: float) -> None:
    """Early ones are never solved here: what was given up must not stand for nothing."""
    rng, n, model = np.random.default_rng(0), 8, LateModel()
    sums, early, late_squares, known = [], [], [], []
    for _ in range(20_000):
        late = rng.random(n) < 0.6
        goes_on = late & (rng.random(n) < keep)
        rewards = np.where(goes_on, rng.random(n) < 0.3, 0.0)
        own = squares(rewards.tolist())
        sums.append(float((own * np.where(late, goes_on / keep**2, 1.0)).mean()))
        early.append(own[~late].sum() / n)
        observed = (own[late] * goes_on[late] / keep).tolist()
        late_squares.extend(observed)
        model.observe(1, observed)
        known.append(model.square(1) or 0.0)
    of_late = visit_variance([float(np.mean(late_squares))], [keep])
    error = float(np.std(sums)) / np.sqrt(len(sums))
    assert abs(0.6 * of_late + np.mean(early) - np.mean(sums)) < 5 * error
    assert np.mean(known) == pytest.approx(float(np.mean(late_squares)), rel=0.1)


def test_a_new_prompt_has_the_spread_of_the_pool_and_evidence_moves_it() -> None:
    model = SpreadModel(prior=4, retained=0.5, pool_visits=1e9)
    assert model.spread(7) == 1.0
    model.observe(1, 0.2, 8)
    model.observe(2, 0.0, 3)
    assert model.spread(7) ** 2 == pytest.approx(0.1)
    assert model.spread(1) ** 2 == pytest.approx((4 * 0.1 + 7 * 0.2) / 11)
    assert model.spread(2) ** 2 == pytest.approx(4 * 0.1 / 6)
    model.observe(1, 0.0, 5)
    pool = 0.2 / 3
    assert model.spread(1) ** 2 == pytest.approx((4 * pool + 0.5 * 7 * 0.2) / (4 + 0.5 * 7 + 4))


def test_a_prompt_without_spread_never_starves_and_soon_has_it_again() -> None:
    model = SpreadModel()
    for _ in range(200):  # always solved, whatever it got; beside it prompts that vary
        model.observe(1, 0.0, 32)
        for other in range(2, 6):
            model.observe(other, 0.2, 8)
    assert model.spread(1) > 0
    lowest = model.spread(1) / model.spread(2)
    for _ in range(4):
        model.observe(1, 0.0, 2)  # it gets the fewest now: what is known fades
    assert model.spread(1) / model.spread(2) > 2.5 * lowest
    model.observe(1, 0.5, 2)  # one solved, one not
    assert model.spread(1) / model.spread(2) > 0.8


def test_evidence_of_one_size_settles_at_that_much() -> None:
    model = SpreadModel(prior=4, retained=RETAINED, pool_visits=64)
    for _ in range(100):
        model.observe(1, 0.25, 9)
        model.observe(2, 0.05, 9)
    degrees = 8 / (1 - RETAINED)
    assert model.spread(1) ** 2 == pytest.approx((4 * 0.15 + degrees * 0.25) / (4 + degrees), rel=0.01)


def test_costs_of_prompts_not_seen_for_an_epoch_have_grown_with_the_others() -> None:
    model, rng = ExpectedLengths(100.0), np.random.default_rng(0)
    sizes = rng.uniform(20, 60, 64)
    off = []
    for step in range(32):  # eight prompts at a time, each seen every eighth step; all grow by 4 % a step
        ids = [(8 * step + i) % 64 for i in range(8)]
        now = sizes * 1.04**step
        expected = sum(8 * model.expected_tokens(i) for i in ids)
        model.observe([plain(i, rng.poisson(now[i], 8).tolist()) for i in ids])
        off.append(sum(8 * now[i] for i in ids) / expected)
    assert np.mean(off[16:]) == pytest.approx(1.08, abs=0.03)  # two steps behind; an epoch behind would be 1.37
    assert model.natural == 1.0


def test_natural_lengths_are_those_of_late_responses_that_went_on_times_all_late_ones() -> None:
    """Unbiased: over many steps it comes to what the responses would have cost without their rule."""
    rng, model, limit = np.random.default_rng(1), ExpectedLengths(100.0), 60
    spent = natural = 0.0
    ratios = []
    for step in range(400):
        visits = []
        for prompt in range(8):
            keep = 0.2 if prompt % 2 else 0.5
            whole = np.ceil(rng.lognormal(3.5 + 0.05 * prompt, 0.6, 16)).astype(int)
            late = whole > limit
            given_up = late & (rng.random(16) > keep)
            tokens = np.where(given_up, limit, whole)
            spent, natural = spent + tokens.sum(), natural + whole.sum()
            visits.append(Visit(prompt, tokens.tolist(), np.where(late, keep, 1.0).tolist(), given_up.tolist()))
        model.observe(visits)
        if step > 20:
            ratios.append(model.natural)
    assert np.mean(ratios) == pytest.approx(natural / spent, rel=0.02)
    assert natural / spent > 1.1


def test_states_survive_json_and_go_on_alike() -> None:
    rng = np.random.default_rng(2)
    spread, costs = SpreadModel(), ExpectedLengths(50.0)
    for _ in range(5):
        spread.observe(int(rng.integers(4)), float(rng.random()), 6)
        late = rng.choice([0.5, 1.0], 4).tolist()
        costs.observe([Visit(int(rng.integers(4)), rng.integers(1, 99, 4).tolist(), late, [False] * 4)])
    spread_2, costs_2 = SpreadModel(), ExpectedLengths(50.0)
    spread_2.load_state_dict(json.loads(json.dumps(spread.state_dict())))
    costs_2.load_state_dict(json.loads(json.dumps(costs.state_dict())))
    for model in (spread, spread_2):
        model.observe(3, 0.3, 5)
    for cost in (costs, costs_2):
        cost.observe([plain(3, [5, 9])])
    assert [spread.spread(i) for i in range(5)] == [spread_2.spread(i) for i in range(5)]
    assert [costs.expected_tokens(i) for i in range(5)] == [costs_2.expected_tokens(i) for i in range(5)]
    assert (spread.state_dict(), costs.state_dict()) == (spread_2.state_dict(), costs_2.state_dict())
