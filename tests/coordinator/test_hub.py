"""The hub: what a large session costs, and who is served first."""

import random

import pytest

from config.coordinator import CoordinatorOptions
from contracts.coordinator import Busy, Drain, Idle, Register, RolloutStarted, Started, State, Stop, Train
from coordinator.hub import BURST, BURST_S, Hub
from coordinator.machine import Machine
from coordinator.wire import Ack, AnswerEncoder, Say, Tell, decode_answer, encode

WORKERS = 256
NAMES = [f"w{i:03}" for i in range(WORKERS)]
OPTIONS = CoordinatorOptions(max_members=WORKERS)


class Fleet:
    """Workers that obey at once, and the hub they speak to. Time stands still unless told."""

    def __init__(self) -> None:
        self.hub = Hub(Machine(OPTIONS, term=1))
        self.now_s = 0.0
        self.numbers = dict.fromkeys(NAMES, -1)
        self.trains: list[Train] = []  # told so far

    def say(self, event: Register | Idle | Busy | Started) -> None:
        self.numbers[event.worker] += 1
        self.hub.hear(event.worker, Say(1, self.numbers[event.worker], event), self.now_s)

    def told(self) -> list[Ack | Tell]:
        """Everything, in order, however long it takes."""
        self.hub.tick(self.now_s)
        out = []
        while self.hub.next_deadline_s <= self.now_s + BURST_S:
            self.now_s = max(self.now_s, self.hub.next_deadline_s)
            self.hub.tick(self.now_s)
            out += [message for _, message in self.hub.take(self.now_s)]
        return out

    def trained(self) -> list[Train]:
        """As `told`: the commands to train, which are obeyed."""
        trains = [m.command for m in self.told() if isinstance(m, Tell) and isinstance(m.command, Train)]
        for train in trains:
            self.say(Started(train.worker, 1, train.session, train.epoch, "h:1" if not train.store else ""))
        return trains


@pytest.fixture
def fleet() -> Fleet:
    """All of them train in one session."""
    fleet = Fleet()
    for name in NAMES:
        fleet.say(Register(name, 1, "n", "g", State.BUSY))
        fleet.say(Idle(name, 1))
    fleet.hub.control(RolloutStarted(1), 0.0)
    assert [len(fleet.trained()) for _ in range(3)] == [1, WORKERS, 0]
    return fleet


def test_many_that_leave_at_one_moment_are_one_new_epoch(fleet: Fleet) -> None:
    """Not one for each, told to all the others: 64 x 256 commands."""
    before = fleet.hub.machine.sessions.epoch
    for name in NAMES[:64]:  # the leader among them
        fleet.say(Busy(name, 1, 1))
    trains = fleet.trained()
    assert [train.worker for train in trains] == [NAMES[64]]  # leads now, and sets up a store
    followers = fleet.trained()
    assert {train.worker for train in followers} == set(NAMES[65:])
    assert {train.members for train in trains + followers} == {tuple(NAMES[64:])}
    assert fleet.hub.machine.sessions.epoch == before + 64  # each made answers about the epoch before it stale
    fleet.told()
    assert fleet.hub.machine.roster.sessions["g"].settled(fleet.hub.machine.roster)


def test_an_acknowledgement_does_not_wait_for_a_whole_session(fleet: Fleet) -> None:
    hub = fleet.hub
    fleet.now_s += 1.0
    fleet.say(Busy("w255", 1, 1))
    hub.tick(fleet.now_s)
    first = [message for _, message in hub.take(fleet.now_s)]
    assert [type(message) for message in first] == [Ack] + [Tell] * BURST
    fleet.say(Busy("w254", 1, 1))
    hub.tick(fleet.now_s)
    assert [type(message) for _, message in hub.take(fleet.now_s)] == [Ack]
    assert hub.next_deadline_s == fleet.now_s + BURST_S
    rest = [message.command for message in fleet.told() if isinstance(message, Tell)]
    assert len(rest) == WORKERS - 2  # all again, as the members have changed; what waited is not sent any more
    assert {len(command.members) for command in rest if isinstance(command, Train)} == {WORKERS - 2}


def test_a_member_that_is_stopped_while_it_waits_to_be_told_is_only_stopped(fleet: Fleet) -> None:
    hub = fleet.hub
    fleet.say(Busy("w000", 1, 1))  # the leader
    hub.tick(fleet.now_s)
    hub.control(Drain(worker="w001"), fleet.now_s)  # before it is told to lead
    told = [m.command for m in fleet.told() if isinstance(m, Tell) and m.command.worker == "w001"]
    assert [type(command) for command in told] == [Stop]


def test_an_answer_that_shares_its_members_is_the_same_frame() -> None:
    rng, encoder = random.Random(0), AnswerEncoder()
    for _ in range(50):
        members = tuple(NAMES[: rng.randrange(5)])
        for name in members or ("w",):
            tell = Tell(Train(name, 1, rng.randrange(2**40), 7, members, rng.choice(("", "h:1"))), 3, 4)
            assert encoder.encode(tell) == encode(tell)
            assert decode_answer(encoder.encode(tell)) == tell
    for message in (Ack(1, 2, 3, "why"), Tell(Stop("w", 1, 2, 3, 0.5, "over"), 1, 2)):
        assert encoder.encode(message) == encode(message)
