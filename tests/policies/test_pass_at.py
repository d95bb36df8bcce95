"""pass@k and maj@k against what they mean, counted out."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.pass_at import majority_at, pass_at


def counted_pass(k: int, right: int, n: int) -> Fraction:
    subsets = list(combinations(range(n), k))
    return Fraction(sum(min(subset) < right for subset in subsets), len(subsets))


def counted_majority(k: int, right: int, wrong: Sequence[int], silent: int) -> Fraction:
    answers = [0] * right + [i for i, size in enumerate(wrong, 1) for _ in range(size)] + [-1] * silent
    subsets = list(combinations(answers, k))
    total = Fraction(0)
    for subset in subsets:
        votes = [subset.count(i) for i in range(len(wrong) + 1)]
        if votes[0] and votes[0] == max(votes):
            total += Fraction(1, votes.count(votes[0]))
    return total / len(subsets)


def papers_code(n: int, c: int, k: int) -> float:
    """The program of Chen et al. 2021, figure 3, by its formula: 1 - prod over i = n-c+1 .. n of (1 - k / i)."""
    return 1.0 if n - c < k else float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def test_pass_at_k_is_the_share_of_subsets_with_a_right_response() -> None:
    for n in range(1, 10):
        for k in range(1, n + 1):
            for right in range(n + 1):
                assert pass_at(k, right, n) == float(counted_pass(k, right, n))


@pytest.mark.parametrize("k", [1, 10, 100])
def test_pass_at_k_is_the_papers_estimator_on_its_number_of_samples(k: int) -> None:
    """HumanEval's n = 200 and k of 1, 10 and 100, for every number of right ones."""
    for right in range(201):
        assert pass_at(k, right, 200) == pytest.approx(papers_code(200, right, k), abs=1e-12)
    assert pass_at(1, 57, 200) == 57 / 200


def test_pass_at_k_of_very_many_samples() -> None:
    assert pass_at(50_000, 1, 100_000) == 0.5
    assert pass_at(1000, 3, 20_000) == pytest.approx(papers_code(20_000, 3, 1000), rel=1e-10)


@given(st.integers(0, 4), st.lists(st.integers(1, 3), max_size=3), st.integers(0, 2), st.integers(1, 12))
def test_majority_is_the_share_of_subsets_that_it_wins(right: int, wrong: list[int], silent: int, k: int) -> None:
    n = right + sum(wrong) + silent
    if not 1 <= k <= n:
        with pytest.raises(ValueError, match="maj@"):
            majority_at(k, right, wrong, silent)
        return
    assert majority_at(k, right, wrong, silent) == pytest.approx(
        float(counted_majority(k, right, wrong, silent)), abs=1e-12
    )


def test_majority_of_many_samples_against_drawn_subsets() -> None:
    right, wrong, silent = 60, [50, 30, 10, 5, 5], 40
    answers = np.array([0] * right + [i for i, size in enumerate(wrong, 1) for _ in range(size)] + [9] * silent)
    generator, won = np.random.default_rng(0), 0.0
    for _ in range(4000):
        votes = np.bincount(generator.permutation(answers)[:32], minlength=10)[:6]
        won += (votes[0] == votes.max()) / (votes == votes.max()).sum()
    assert majority_at(32, right, wrong, silent) == pytest.approx(won / 4000, abs=0.03)


def test_majority_of_one_response_is_the_share_of_right_ones_and_of_all_of_them_the_largest_group() -> None:
    assert majority_at(1, 3, [4, 2], 1) == pytest.approx(0.3)
    assert majority_at(9, 4, [4, 1]) == 0.5
    assert majority_at(9, 3, [4, 2]) == 0.0
    assert majority_at(3, 0, [], 3) == 0.0


@pytest.mark.parametrize(("k", "right", "n"), [(0, 1, 2), (3, 1, 2), (1, 3, 2), (1, -1, 2)])
def test_what_is_no_subset_is_refused(k: int, right: int, n: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at(k, right, n)
