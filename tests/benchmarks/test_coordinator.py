"""The coordinator's benchmark, in small: what it counts is what happened."""

import pytest

from benchmarks import coordinator


def test_round_trips_and_preemption_over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    found = coordinator.round_trip(members=3, workers=8, seconds=0.1)
    assert (found["workers"], found["members"], found["sessions"]) == (8, 3, 1)
    answers = found["by_message"]
    assert answers["Stopped"]["count"] == 3
    assert answers["Started"]["count"] >= 3  # the leader's twice
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    monkeypatch.setattr(coordinator, "PREEMPTION_TARGETS_MS", {6: 1e6})
    (row,) = coordinator.preemption(rounds=2)
    assert 0 < row["p50_ms"] <= row["max_ms"]
    assert (row["workers"], row["within_target"]) == (6, True)


def test_a_cycle_of_the_machine_alone_counts_its_events() -> None:
    found = coordinator.machine_alone(workers=40, of=20)
    # per cycle: a rollout's two ends; idle, stopped and busy of 40; started of 40, of the two leaders twice
    assert found["events_per_cycle"] == 2 + 3 * 40 + 40 + 2
