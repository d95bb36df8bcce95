"""The machine, links, members and driver together, in virtual time, on a bad network, among crashes."""

import pytest

from coordinator.options import CoordinatorOptions
from coordinator.simulator import NO_FAULTS, BrokenTruthError, Faults, Simulation

OPTIONS = CoordinatorOptions(
    heartbeat_s=1, lease_s=5, start_deadline_s=3, stop_deadline_s=1, retry_after_s=2, max_members=4
)


@pytest.mark.parametrize("block", range(4))
def test_truth_and_books_hold_among_faults(block: int) -> None:
    happened = set()
    for seed in range(10 * block, 10 * block + 10):
        outcome = Simulation(seed, OPTIONS).run(40.0)
        happened |= set(outcome.happened) | set(outcome.counts)
    wanted = {"dropped", "worker crashed", "coordinator crashed", "work while training", "trainer killed"}
    assert wanted <= happened
    assert {"sent again", "repeated", "replayed", "gap", "unopened"} <= happened


def test_the_same_seed_is_the_same_history() -> None:
    assert Simulation(3, OPTIONS).run(30.0) == Simulation(3, OPTIONS).run(30.0)


def test_on_a_good_network_nobody_waits_longer_than_a_micro_step_to_be_free() -> None:
    outcome = Simulation(1, OPTIONS, workers=16, groups=4, faults=NO_FAULTS, micro_step_s=0.2).run(120.0)
    assert len(outcome.preemption_s) >= 8
    assert max(outcome.preemption_s) < 0.2 + 0.01
    assert outcome.counts["sent again"] == outcome.counts["repeated"] == 0
    assert outcome.happened["members changed"] > 10


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        ("coordinator.sessions", "Sessions._haunted", lambda self, group, now_s: False),
        ("coordinator.machine", "Machine._haunt", lambda self, worker, until_s: None),
        ("coordinator.member", "Member.connected", lambda self, now_s: True),
        ("coordinator.link", "Inlink.close", lambda self: None),
        ("coordinator.link", "Outlink.repeats", lambda self, now_s: []),
        ("coordinator.member", "Member._stop_here", lambda self, reason: None),
    ],
)
def test_the_simulator_finds_what_is_broken(
    module: str, name: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{module}.{name}", broken)
    harsh = Faults(trainer_hang=0.3, coordinator_crash_rate=0.03, late=0.2, late_s=4.0)
    with pytest.raises(BrokenTruthError):
        for seed in range(60):
            Simulation(seed, OPTIONS, faults=harsh).run(40.0)
