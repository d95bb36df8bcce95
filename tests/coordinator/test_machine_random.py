"""Whatever order events come in: the invariants of the machine hold after each."""

import random

import pytest

from coordinator.events import (
    Busy,
    Command,
    Drain,
    Event,
    Heartbeat,
    Idle,
    Join,
    Lead,
    Leave,
    Members,
    Pause,
    Register,
    Resume,
    RolloutComplete,
    RolloutStarted,
    SetThreshold,
    Started,
    State,
    Stop,
    Stopped,
    Tick,
    TrainerFailed,
    Undrain,
)
from coordinator.machine import IllegalTransitionError, Machine, UnknownTargetError
from coordinator.options import CoordinatorOptions
from coordinator.roster import Phase

OPTIONS = CoordinatorOptions(lease_s=5, start_timeout_s=3, stop_timeout_s=1, retry_after_s=2)
WORKERS = [f"w{i}" for i in range(5)]


def check(machine: Machine, now_s: float) -> None:
    for worker in machine.roster:
        assert (worker.state is State.TRAINING) == (worker.session is not None) == (worker.phase is not None)
        owes = worker.phase in (Phase.STARTING, Phase.STOPPING)
        assert owes == (worker.answer_by_s is not None)
        if worker.answer_by_s is not None:
            assert now_s < worker.answer_by_s <= now_s + 3
        assert now_s - worker.heard_s < OPTIONS.lease_s
        if worker.state is State.TRAINING and worker.phase is not Phase.STOPPING:
            assert machine.roster.session_of(worker) is not None
    for group, session in machine.roster.sessions.items():
        assert session.leader in session.members
        assert len(set(session.members)) == len(session.members)
        for name in session.members:
            member = machine.roster.workers[name]
            assert member.group == group == session.group
            assert member.session == session.number
            assert member.phase is not Phase.STOPPING
    if not machine.rolling and machine.paused:
        assert not any(w.phase is Phase.STARTING for w in machine.roster)


def random_event(rng: random.Random, machine: Machine) -> Event:
    name = rng.choice(WORKERS)
    known = machine.roster.workers.get(name)
    incarnation = (known.incarnation if known else 1) + rng.choice([0] * 12 + [-1, 1])
    session = (known.session if known and known.session else 0) or rng.randint(1, 4)
    session = session if rng.random() < 0.8 else rng.randint(1, 9)
    state = rng.choice(list(State))
    number = session if state is State.TRAINING or rng.random() < 0.05 else 0
    return rng.choice(
        [
            lambda: Register(
                name,
                incarnation,
                f"n{rng.randint(0, 1)}",
                f"g{rng.randint(0, 1)}",
                state,
                number,
                leader=rng.random() < 0.3,
            ),
            lambda: Heartbeat(name, incarnation),
            lambda: Busy(name, incarnation),
            lambda: Idle(name, incarnation),
            lambda: Idle(name, incarnation),
            lambda: Started(name, incarnation, session),
            lambda: Stopped(name, incarnation, session),
            lambda: TrainerFailed(name, incarnation, session, "broken"),
            lambda: Leave(name, incarnation) if rng.random() < 0.2 else Heartbeat(name, incarnation),
            lambda: RolloutStarted(1),
            lambda: RolloutComplete(1) if rng.random() < 0.3 else RolloutStarted(1),
            lambda: rng.choice(
                [Drain(worker=name), Drain(node="n0"), Drain(), Undrain(worker=name), Undrain(node="n0")]
            ),
            lambda: rng.choice([Pause(), Resume(), Resume(), SetThreshold(rng.randint(0, 3))]),
            Tick,
        ]
    )()


@pytest.mark.parametrize("seed", range(40))
def test_invariants_hold_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    machine, now_s, seen = Machine(OPTIONS, term=1), 0.0, set[type]()
    for _ in range(2500):
        now_s += rng.choice([0, 0.01, 0.1, 0.5])
        event = random_event(rng, machine)
        before = repr((machine.roster.workers, machine.roster.sessions, machine.roster.drained_nodes))
        try:
            commands: list[Command] = machine.step(event, now_s)
        except (IllegalTransitionError, UnknownTargetError):
            assert repr((machine.roster.workers, machine.roster.sessions, machine.roster.drained_nodes)) == before
            machine.step(Tick(), now_s)
            continue
        seen |= {type(command) for command in commands}
        for command in commands:
            if isinstance(command, Lead | Join | Members):
                assert command.term == 1
        check(machine, now_s)
        assert machine.next_deadline_s > now_s
    assert {Lead, Join, Members, Stop} <= seen
