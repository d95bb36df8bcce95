"""The machine, links, members and driver together, in virtual time, on a bad network, among crashes."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.member import Member
from coordinator.options import CoordinatorOptions
from coordinator.simulator import NO_FAULTS, BrokenTruthError, Simulation
from coordinator.wire import Ack, Tell
from tests.coordinator.random_worlds import random_world

OPTIONS = CoordinatorOptions(
    heartbeat_s=1, lease_s=5, start_deadline_s=3, stop_deadline_s=1, retry_after_s=2, max_members=4
)


def test_truth_and_books_hold_in_random_worlds() -> None:
    """300 here, more by tests/coordinator/fuzz.py. Everything that can happen does."""
    happened: Counter[str] = Counter()
    for seed in range(300):
        outcome = random_world(seed).run()
        happened += outcome.happened + outcome.counts
    wanted = {"dropped", "worker crashed", "coordinator crashed", "work while training", "trainer killed", "pause"}
    wanted |= {"sent again", "repeated", "replayed", "gap", "unopened", "outdated", "drain", "members changed"}
    assert {name for name in wanted if happened[name] < 20} == set()
    assert happened["illegal"] == happened["impostor"] == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(1_000_000, 2**32))
def test_truth_and_books_hold_in_any_world(seed: int) -> None:
    random_world(seed).run()


def test_the_same_seed_is_the_same_history() -> None:
    assert Simulation(3, OPTIONS).run(30.0) == Simulation(3, OPTIONS).run(30.0)


def test_on_a_good_network_nobody_waits_longer_than_a_micro_step_to_be_free() -> None:
    outcome = Simulation(1, OPTIONS, workers=16, groups=4, faults=NO_FAULTS, micro_step_s=0.2).run(120.0)
    assert len(outcome.preemption_s) >= 8
    assert max(outcome.preemption_s) < 0.2 + 0.01
    assert outcome.counts["sent again"] == outcome.counts["repeated"] == 0
    assert outcome.happened["members changed"] > 10


def hear_any_incarnation(member: Member, message: Ack | Tell, now_s: float) -> None:
    HEAR(member, msgspec.structs.replace(message, incarnation=member.identity.incarnation), now_s)


HEAR = Member.hear


@pytest.mark.parametrize(
    ("name", "broken", "seeds"),
    [
        ("coordinator.sessions.Sessions._haunted", lambda self, group, now_s: False, range(20)),
        ("coordinator.machine.Machine._haunt", lambda self, worker, until_s: None, range(20)),
        ("coordinator.member.Member.connected", lambda self, now_s: True, range(60)),
        ("coordinator.member.Member._stop_here", lambda self, reason: None, range(20)),
        ("coordinator.member.Member.hear", hear_any_incarnation, range(200)),
        ("coordinator.link.Inlink.close", lambda self: None, range(100, 150)),  # rarely matters
        ("coordinator.link.Outlink.repeats", lambda self, now_s: [], range(2)),
    ],
)
def test_the_simulator_finds_what_is_broken(
    name: str, broken: object, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name, broken)

    def run_all() -> None:
        for seed in seeds:
            random_world(seed).run()

    with pytest.raises(BrokenTruthError):
        run_all()
