"""The expected gradient of an RL step under a budget and an abort, over draws: unbiased for objective duet, and what is
said of other forms. The exact sum over all outcomes: tests/learner/test_duet_gradient.py."""

import pytest

from tests.launch.listed_policy import (
    KEEP,
    UNEVEN,
    UNIFORM,
    Kind,
    estimates,
    kinds_of,
    prompt_weight,
    second_moment,
    thresholds,
)

STEPS = 400


@pytest.fixture(scope="module")
def kinds() -> list[Kind]:
    return kinds_of(0)


@pytest.mark.parametrize(
    ("counts", "keep", "biased"),
    [
        (UNEVEN, None, ["prompts not weighed", "own reward in the baseline"]),
        (UNIFORM, KEEP, ["kept late ones not weighed", "weights divided by their sum"]),
    ],
)
def test_duet_is_unbiased_and_each_part_of_it_is_needed(
    kinds: list[Kind], counts: tuple[int, ...], keep: float | None, biased: list[str]
) -> None:
    """z: of the squared distance from the exact gradient, in standard errors."""
    found = estimates(kinds, ["duet", *biased], counts=counts, keep=keep, steps=STEPS, seed=7)
    assert abs(found["duet"].z) < 3
    for name in biased:
        assert found[name].z > 6, name


@pytest.mark.parametrize(
    ("solved", "count", "weight"), [(0.1, 2, 0.32), (0.1, 4, 0.67), (0.1, 16, 1.27), (0.1, 32, 1.42), (0.02, 2, 0.29)]
)
def test_grpo_counts_a_prompt_by_its_number_of_responses_and_duet_does_not(
    solved: float, count: int, weight: float
) -> None:
    """Relative to 8 responses, exactly; undivided but with one's own reward in the baseline it is (n - 1) / n."""
    assert prompt_weight(solved, count, True) / prompt_weight(solved, 8, True) == pytest.approx(weight, abs=0.005)
    assert prompt_weight(solved, count, False) == pytest.approx((count - 1) / count)
    assert prompt_weight(solved, count, False, "leave_one_out") == pytest.approx(1.0)


def test_the_second_moment_grows_by_less_than_the_paper_allows(kinds: list[Kind]) -> None:
    """DUET, eq. 8, which leaves out what the end after an answer saves."""
    for kind in (kinds[0], kinds[3]):
        moment = second_moment(kind, 0.1)
        assert 0 < moment["surcharge"] < moment["allowed"]


def test_a_threshold_stays_where_it_is_meant_to_be_only_if_kept_late_responses_count_for_the_others() -> None:
    weighed, plain = (thresholds(0, weighed=weighed)[-10:] for weighed in (True, False))
    assert all(0.7 < share < 0.9 for share in weighed)
    assert all(share < 0.5 for share in plain)
