"""When a drafter is trained: cold, after a drop, not too often; and a restart changes nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.drafter.drift import MIN_DRAFTED, DriftMonitor


def test_a_drafter_that_was_never_trained_is_due() -> None:
    monitor = DriftMonitor(0.2, 10)
    monitor.observe("eagle:4", 1000, 500)
    assert monitor.due(1)


def test_a_drop_by_the_configured_share_is_due_and_a_smaller_one_is_not() -> None:
    monitor = DriftMonitor(0.2, 1)
    monitor.trained(5)
    monitor.observe("eagle:4", 1000, 500)
    assert monitor.level == 1.0
    assert not monitor.due(6)
    monitor.observe("eagle:4", 1000, 401)
    assert monitor.level == pytest.approx(0.802)
    assert not monitor.due(7)
    monitor.observe("eagle:4", 1000, 400)
    assert monitor.due(8)
    monitor.observe("eagle:4", 1000, 600)  # it came back by itself: a new best
    assert not monitor.due(9)
    monitor.observe("eagle:4", 1000, 480)
    assert monitor.due(10)


def test_the_best_is_measured_anew_after_a_training() -> None:
    monitor = DriftMonitor(0.2, 1)
    monitor.trained(1)
    monitor.observe("eagle:4", 1000, 900)
    monitor.trained(2)
    monitor.observe("eagle:4", 1000, 300)
    assert not monitor.due(3)


def test_not_measured_after_a_training_waits_one_more_step() -> None:
    monitor = DriftMonitor(0.2, 3)
    monitor.trained(10)
    monitor.observe("eagle:4", MIN_DRAFTED - 1, 5)
    assert monitor.level is None
    assert [monitor.due(step) for step in (11, 12, 13, 14)] == [False, False, False, True]


def test_a_drafter_of_which_nothing_is_ever_accepted_is_due() -> None:
    monitor = DriftMonitor(0.2, 1)
    monitor.trained(1)
    monitor.observe("eagle:4", 1000, 0)
    monitor.observe("eagle:4", 1000, 0)
    assert monitor.due(2)


def test_another_strategy_is_no_drift() -> None:
    monitor = DriftMonitor(0.2, 1)
    monitor.trained(1)
    monitor.observe("eagle:2", 1000, 600)
    monitor.observe("eagle:4x3/12", 1000, 200)
    assert not monitor.due(2)
    monitor.observe("eagle:4x3/12", 1000, 150)
    assert monitor.due(3)


@pytest.mark.parametrize(("drift", "every"), [(-0.1, 1), (1.1, 1), (0.5, 0)])
def test_impossible_options(drift: float, every: int) -> None:
    with pytest.raises(ValueError, match="every_steps"):
        DriftMonitor(drift, every)


steps = st.lists(st.tuples(st.integers(0, 600), st.floats(0, 1), st.booleans()), max_size=40)


@given(st.floats(0, 1), st.integers(1, 5), steps)
def test_never_more_often_than_every_steps_and_the_same_after_a_restart(
    drift: float, every: int, history: list[tuple[int, float, bool]]
) -> None:
    monitor, trained_at = DriftMonitor(drift, every), None
    for step, (drafted, rate, trains) in enumerate(history, start=1):
        monitor.observe("eagle:4", drafted, round(drafted * rate))
        again = DriftMonitor(drift, every)
        again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
        assert [again.due(at) for at in range(step, step + 8)] == [monitor.due(at) for at in range(step, step + 8)]
        monitor = again
        if trained_at is None:
            assert monitor.due(step)
        elif step - trained_at < every:
            assert not monitor.due(step)
        elif drift == 0:
            assert monitor.due(step)
        if trains and monitor.due(step):
            monitor.trained(step)
            trained_at = step
