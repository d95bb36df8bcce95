"""What a drafter's profile learns from holds whose drafts are shorter than their strategy allows."""

import pytest

from policies.speculation.profile import DrafterProfile
from policies.speculation.strategy import Strategy

DEEP = Strategy("suffix", 16)


def learned(drafted_each: float, accepted_each: float, *, extra_s: float) -> DrafterProfile:
    """A hold of 100 steps of 4 requests."""
    profile = DrafterProfile()
    profile.learn(DEEP, 400, 100, round(400 * drafted_each), round(400 * accepted_each), 100 * extra_s)
    return profile


def test_a_ragged_drafters_step_costs_what_was_drafted_not_what_was_allowed() -> None:
    """Three of 16 tokens were drafted, so their verification has cost three rows of each request, and will again."""
    ragged, full = learned(3, 2, extra_s=12e-6), learned(16, 2, extra_s=64e-6)
    assert ragged.extra_s(DEEP, 4) == pytest.approx(12e-6)
    assert full.extra_s(DEEP, 4) == pytest.approx(64e-6)
    # A row costs 1 us in both worlds, and that is what each row of other batches is taken to cost.
    assert ragged.cost.rows_s / ragged.cost.rows_rows == pytest.approx(1e-6)
    assert full.cost.rows_s / full.cost.rows_rows == pytest.approx(1e-6)


def test_the_rate_is_that_of_going_on_whether_the_drafter_or_the_target_ended_a_draft() -> None:
    """So a drafter that stops early promises no more at greater depth than it has shown."""
    short, long = learned(2, 2, extra_s=0.0), learned(16, 2, extra_s=0.0)
    assert short.rate == long.rate
    predicted = short.predict(DEEP, 4, 1e-3)
    assert predicted is not None
    assert 2 < predicted < 4
