"""The machine, links, members and driver together, in virtual time, on a bad network, among crashes."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.coordinator import CoordinatorOptions
from contracts.coordinator import Register, Started
from coordinator.member import Member
from coordinator.roster import Worker
from coordinator.sessions import Sessions
from coordinator.standing import Standing
from coordinator.wire import Ack, Tell
from tests.coordinator.random_worlds import random_world
from tests.coordinator.world.simulated import NO_FAULTS
from tests.coordinator.world.simulator import Simulation

OPTIONS = CoordinatorOptions(
    heartbeat_s=1, lease_s=5, start_deadline_s=3, stop_deadline_s=1, retry_after_s=2, max_members=4
)


EVERY_KIND = {
    *("dropped", "worker crashed", "coordinator crashed", "driver crashed", "work while training", "trainer killed"),
    *("worker joined", "worker left", "worker gone", "node joined", "node died", "notice", "node cut off"),
    *("sent again", "repeated", "replayed", "gap", "unopened", "outdated", "drain", "pause", "members changed"),
}


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.long) for block in range(1, 4))])
def test_truth_and_books_hold_in_random_worlds(block: int) -> None:
    """250 in `make test`, 1,000 in `make test-all`, more by tests/coordinator/fuzz.py. Each block has all faults."""
    happened: Counter[str] = Counter()
    for seed in range(250 * block, 250 * (block + 1)):
        outcome = random_world(seed).run()
        happened += outcome.happened + outcome.counts
    assert {name for name in EVERY_KIND if happened[name] < 20} == set()
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
FORGETS = property(lambda self: Standing())  # a successor knows of no drain and no pause


def confirm_any_epoch(sessions: Sessions, worker: Worker, event: Started, now_s: float) -> bool:
    session = sessions._roster.session_of(worker)
    return CONFIRM(
        sessions, worker, msgspec.structs.replace(event, epoch=session.epoch) if session is not None else event, now_s
    )


CONFIRM = Sessions.confirm


def nothing(*_: object) -> None:
    pass


def never(*_: object) -> bool:
    return False


@pytest.mark.parametrize(
    ("broken", "seeds", "says"),
    [
        ({"coordinator.sessions.Sessions._haunted": lambda self, group, now_s: False}, range(20), "others train in"),
        ({"coordinator.machine.Machine._haunt": nothing}, range(20), "others train in"),
        ({"coordinator.member.Member.connected": lambda self, now_s: True}, range(192, 193), "others train in"),
        ({"coordinator.member.Member._stop_here": nothing}, range(20), "should have ended"),
        ({"coordinator.member.Member.hear": hear_any_incarnation}, range(1408, 1409), "others train in"),
        ({"coordinator.link.Inlink.close": nothing}, range(765, 766), "is not registered"),
        ({"coordinator.sessions.Sessions.confirm": confirm_any_epoch}, range(10, 48), "trains as .*, the books"),
        ({"coordinator.link.Outlink.repeats": lambda self, now_s: []}, range(2), "time stands still"),
        ({"coordinator.hub.Hub._owes": lambda self, name: False}, range(55, 56), "calm again, .*is believed"),
        ({"coordinator.link.opens": lambda say: isinstance(say.event, Register)}, range(21, 46), "the driver"),
        (
            {
                "coordinator.machine.Machine._lose": nothing,
                "tests.coordinator.world.simulator.check_invariants": nothing,
            },
            range(5),
            "is gone for good",
        ),
        ({"coordinator.machine.Machine._lose": nothing}, range(5), "nobody will notice"),
        ({"coordinator.roster.Roster.drained": never}, range(5), "is to train, but it is drained"),
        (
            {
                "coordinator.roster.Roster.drained": lambda self, worker: False,
                "tests.coordinator.world.wishes.Wishes.check": nothing,
            },
            range(6, 21),
            "obeys .*, drained or paused",
        ),
        ({"coordinator.machine.Machine.standing": FORGETS}, range(33, 34), "asked for since"),
        (
            {"coordinator.machine.Machine.standing": FORGETS, "tests.coordinator.world.wishes.Wishes.check": nothing},
            range(290, 299),
            "obeys .*, drained or paused",
        ),
    ],
)
def test_the_simulator_finds_what_is_broken(
    broken: dict[str, object], seeds: range, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rule that it checks can be broken."""
    for name, function in broken.items():
        monkeypatch.setattr(name, function)

    def run_all() -> None:
        for seed in seeds:
            random_world(seed).run()

    with pytest.raises(AssertionError, match=says):
        run_all()
