"""Responses of an RL step's prompts under one budget of tokens: against the closed form, all integers, and itself."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.token_budget.allocation import allocate, bound, variance

pytestmark = pytest.mark.timeout(120)


def cost(counts: np.ndarray, tokens: np.ndarray) -> float:
    return float((counts * tokens).sum())


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, float, int, int]:
    """(spread, tokens, budget, least, most) of up to 24 prompts, ties and prompts without spread included."""
    size = draw(st.integers(1, 24))
    spread = draw(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5]) | st.floats(0, 1), min_size=size, max_size=size))
    tokens = draw(st.lists(st.sampled_from([10.0, 50.0]) | st.floats(1, 500), min_size=size, max_size=size))
    least = draw(st.integers(1, 3))
    most = draw(st.integers(least, 40))
    each = draw(st.floats(0.1, 50))
    return np.array(spread), np.array(tokens), each * sum(tokens), least, most


@settings(deadline=None, max_examples=200)
@given(problems())
def test_the_cost_misses_the_budget_by_half_a_mean_length_at_most_unless_bounds_forbid_it(
    problem: tuple[np.ndarray, np.ndarray, float, int, int],
) -> None:
    spread, tokens, budget, least, most = problem
    counts, _ = allocate(spread, tokens, budget, least=least, most=most)
    assert ((least <= counts) & (counts <= most)).all()
    assert np.array_equal(counts, allocate(spread, tokens, budget, least=least, most=most)[0])
    off, half = cost(counts, tokens) - budget, tokens.mean() / 2 * (1 + 1e-9)
    if off > half:
        assert (counts == least).all()  # below the floor of the budget
    short = counts[tokens <= tokens.mean()]
    if off < -half:
        assert (short == most).all()  # only responses longer than the mean could be bought, and none fits


def test_far_from_its_bounds_an_allocation_has_the_variance_of_theorem_1() -> None:
    """(sum of s sqrt(L))^2 / B: what the optimum in real numbers has; so many responses hide the rounding."""
    rng = np.random.default_rng(0)
    spread, tokens = rng.uniform(0.05, 0.5, 64), rng.lognormal(4, 0.8, 64)
    budget = 4000 * float(tokens.sum())
    counts, price = allocate(spread, tokens, budget, least=1, most=10**6)
    best = float((spread * np.sqrt(tokens)).sum()) ** 2 / budget / 64**2
    assert variance(spread, counts) == pytest.approx(best, rel=1e-6)
    assert np.allclose(counts, spread / np.sqrt(price * tokens), rtol=2e-3)
    equal = variance(spread, np.full(64, 4000.0))
    assert best / equal == pytest.approx(1 - bound(spread, tokens), rel=1e-12)


def test_counts_of_few_prompts_are_the_best_of_all_whole_ones_of_their_cost() -> None:
    """With equal lengths exactly; else as good as the best of all that cost no more, to a hundredth on average."""
    rng = np.random.default_rng(1)
    losses = []
    for case in range(60):
        size = int(rng.integers(2, 5))
        spread = rng.uniform(0.02, 0.5, size)
        tokens = np.full(size, 7.0) if case % 2 else rng.uniform(5, 60, size)
        budget = float(rng.uniform(2, 7)) * float(tokens.sum())
        counts, _ = allocate(spread, tokens, budget, least=1, most=8)
        every = np.array(list(product(range(1, 9), repeat=size)))
        allowed = every[(every * tokens).sum(1) <= cost(counts, tokens) + 1e-9]
        best = float((spread**2 / allowed).sum(1).min()) / size**2
        if case % 2:
            assert variance(spread, counts) == pytest.approx(best, rel=1e-12)
        losses.append(variance(spread, counts) / best - 1)
    assert np.mean(losses) < 0.01
    assert max(losses) < 0.10


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 100), min_size=2, max_size=24), st.floats(2, 20))
def test_of_two_prompts_the_one_with_more_spread_or_shorter_responses_gets_no_fewer(
    values: list[int], each: float
) -> None:
    by_spread, same = np.array(values) / 100, np.full(len(values), 20.0)  # no two a rounding error apart
    counts = allocate(by_spread, same, each * same.sum(), least=2, most=32)[0]
    assert all(counts[i] <= counts[j] for i, a in enumerate(values) for j, b in enumerate(values) if a < b)
    tokens = 10 + 100 * by_spread
    counts = allocate(np.full(len(values), 0.4), tokens, each * tokens.sum(), least=2, most=32)[0]
    assert all(counts[i] >= counts[j] for i, a in enumerate(values) for j, b in enumerate(values) if a < b)


def test_equal_prompts_share_what_is_left_from_the_first_on_and_no_spread_is_like_equal_spread() -> None:
    nine = np.full(7, 9.0)
    for spread in (np.ones(7), np.zeros(7)):
        counts, _ = allocate(spread, nine, 7 * 9 * 3.5, least=2, most=32)
        assert counts.tolist() == [4, 4, 4, 4, 3, 3, 3]


def test_more_tokens_never_mean_a_larger_variance() -> None:
    rng = np.random.default_rng(2)
    spread, tokens = rng.uniform(0, 0.5, 16), rng.lognormal(4, 0.6, 16)
    made = [allocate(spread, tokens, b * tokens.sum(), least=2, most=32)[0] for b in np.linspace(2, 32, 61)]
    variances = [variance(spread, each) for each in made]
    assert all(later <= earlier * 1.001 for earlier, later in pairwise(variances))
    assert made[0].tolist() == [2] * 16
    assert made[-1].tolist() == [32] * 16


def test_a_prompt_of_no_use_gets_the_least_and_what_others_cannot_use() -> None:
    spread, tokens = np.array([0.5, 0.5, 0.0]), np.full(3, 10.0)
    assert allocate(spread, tokens, 200, least=2, most=32)[0].tolist() == [9, 9, 2]
    assert allocate(spread, tokens, 200, least=2, most=8)[0].tolist() == [8, 8, 4]


def test_what_cannot_be_allocated_is_refused() -> None:
    one = np.ones(1)
    for spread, tokens, least, most in (
        (one, np.zeros(1), 2, 4),
        (-one, one, 2, 4),
        (one, one, 3, 2),
        (one, np.ones(2), 1, 2),
        (np.array([np.nan]), one, 1, 2),
    ):
        with pytest.raises(ValueError, match=r"each prompt|finite"):
            allocate(spread, tokens, 9.0, least=least, most=most)
