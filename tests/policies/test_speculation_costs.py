"""The measured cost of a plain step: robust where it was measured, sensible between and beyond."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.costs import PlainCost


def cost_of(**measured_s: float) -> PlainCost:
    cost = PlainCost()
    for running, step_s in measured_s.items():
        cost.add(int(running[1:]), step_s)
    return cost


def test_nothing_measured_nothing_known() -> None:
    assert PlainCost().at(4) is None
    assert not PlainCost().measured_near(4)


def test_an_interrupted_measurement_moves_nothing_and_new_ones_replace_old_ones() -> None:
    cost = PlainCost()
    for step_s in (1e-3, 5e-2, 1e-3, 1e-3, 7e-2):
        cost.add(4, step_s)
    assert cost.at(4) == 1e-3
    for _ in range(9):
        cost.add(4, 2e-3)
    assert cost.at(4) == 2e-3


def test_between_two_sizes_it_is_on_their_line() -> None:
    cost = cost_of(b2=2e-3, b10=6e-3)
    assert cost.at(6) == pytest.approx(4e-3)
    assert cost.at(4) == pytest.approx(3e-3)
    cost.add(6, 5e-3)  # what was inferred gives way to what is measured
    assert cost.at(6) == 5e-3
    assert cost.at(8) == pytest.approx(5.5e-3)


def test_beyond_it_changes_less_than_the_batch_does() -> None:
    cost = cost_of(b8=8e-3)
    assert 4e-3 < cost.at(4) < 8e-3
    assert 8e-3 < cost.at(16) < 16e-3


def test_near_is_a_quarter() -> None:
    cost = cost_of(b16=1e-3)
    assert [cost.measured_near(running) for running in (12, 13, 16, 21, 22)] == [False, True, True, True, False]


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 1)), min_size=1, max_size=30), st.integers(1, 256))
def test_always_positive_and_within_reason(measured: list[tuple[int, float]], running: int) -> None:
    cost = PlainCost()
    for size, step_s in measured:
        cost.add(size, step_s)
    found = cost.at(running)
    assert found is not None
    assert 0 < found <= 1.5 * max(step_s for _, step_s in measured) + 1e-8


# A machine that changes its speed.


def test_a_doubted_cost_that_is_confirmed_changes_nothing_else() -> None:
    cost = PlainCost()
    cost.add(1, 1.0)
    cost.add(8, 2.0)
    cost.doubt()
    cost.add(8, 2.1)
    assert cost.at(1) == 1.0
    assert not cost.doubted


def test_a_doubted_cost_that_was_another_speeds_is_corrected_for_every_batch_size() -> None:
    cost = PlainCost()
    cost.add(1, 1.0)
    cost.add(8, 2.0)
    cost.doubt()
    cost.add(8, 0.5, sure=False)  # a step or two may have been lucky
    assert cost.doubted
    cost = PlainCost()
    cost.add(1, 1.0)
    cost.add(8, 2.0)
    cost.doubt()
    cost.add(8, 0.5)
    assert cost.at(1) == pytest.approx(0.25)
    assert cost.at(8) == pytest.approx(0.5)


def test_it_knows_how_old_it_is() -> None:
    cost = PlainCost()
    assert not cost.measured_since(0)
    cost.add(4, 1.0, 100)
    assert cost.measured_since(100)
    assert not cost.measured_since(101)
