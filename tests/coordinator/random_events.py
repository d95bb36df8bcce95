"""Random events for the coordinator's machine, whose invariants are checked after each. Owns how likely they are."""

import random
from collections.abc import Callable

from config.coordinator import CoordinatorOptions
from contracts.coordinator import (
    Busy,
    Drain,
    Event,
    Heartbeat,
    Idle,
    Leave,
    Pause,
    Register,
    Resume,
    RolloutComplete,
    RolloutStarted,
    SetThreshold,
    Started,
    State,
    Stopped,
    TrainerFailed,
    Undrain,
)
from coordinator.machine import IllegalTransitionError, Machine, UnknownTargetError
from tests.coordinator.world.invariants import check_invariants

OPTIONS = CoordinatorOptions(
    heartbeat_s=1, lease_s=5, start_deadline_s=3, stop_deadline_s=1, retry_after_s=2, max_members=3
)
WORKERS = tuple(f"w{i}" for i in range(5))


def snapshot(machine: Machine) -> str:
    """Everything that an event may change, as text."""
    return repr((machine.roster, machine.rolling, machine.paused, machine.sessions.threshold, machine.sessions.epoch))


def random_event(rng: random.Random, machine: Machine) -> Event | None:
    """Any event, likely and unlikely ones, with fields near the truth; None: time passes."""
    name = WORKERS[int(rng.random() * len(WORKERS))]
    known = machine.roster.workers.get(name)
    incarnation = known.incarnation if known else 1
    if (dice := rng.random()) < 0.1:
        incarnation += 1 if dice < 0.05 else -1
    epoch = machine.sessions.epoch + (rng.randint(-2, 1) if rng.random() < 0.2 else 0)
    session = (known.session if known and known.session and rng.random() < 0.9 else 0) or rng.randint(1, max(1, epoch))
    if known is None and rng.random() < 0.7:
        return _register(rng, name, incarnation, session)
    make = _EVENTS[int(rng.random() * len(_EVENTS))]
    return make(rng, name, incarnation, session, epoch)


def _register(rng: random.Random, name: str, incarnation: int, session: int) -> Register:
    state = rng.choice((State.BUSY, State.IDLE, State.TRAINING))
    number = session if (state is State.TRAINING) != (rng.random() < 0.03) else 0
    leader = rng.random() < 0.3
    group, node = f"g{int(rng.random() * 1.2)}", f"n{int(name[1:]) % 2}"
    return Register(name, incarnation, node, group, state, number, leader, "h:1" if leader else "")


_EVENTS: list[Callable[[random.Random, str, int, int, int], Event | None]] = [
    lambda rng, name, inc, session, epoch: _register(rng, name, inc, session),
    lambda rng, name, inc, session, epoch: Heartbeat(name, inc, State.IDLE),
    lambda rng, name, inc, session, epoch: Heartbeat(name, inc, State.TRAINING, session),
    lambda rng, name, inc, session, epoch: Busy(name, inc, 3),
    lambda rng, name, inc, session, epoch: Idle(name, inc),
    lambda rng, name, inc, session, epoch: Idle(name, inc),
    lambda rng, name, inc, session, epoch: Idle(name, inc),
    lambda rng, name, inc, session, epoch: Started(name, inc, session, epoch, "h:1"),
    lambda rng, name, inc, session, epoch: Started(name, inc, session, epoch, "h:1"),
    lambda rng, name, inc, session, epoch: Started(name, inc, session, epoch, ""),
    lambda rng, name, inc, session, epoch: Stopped(name, inc, session),
    lambda rng, name, inc, session, epoch: TrainerFailed(name, inc, session, "broken"),
    lambda rng, name, inc, session, epoch: Leave(name, inc) if rng.random() < 0.2 else None,
    lambda rng, name, inc, session, epoch: RolloutStarted(1),
    lambda rng, name, inc, session, epoch: RolloutStarted(1, rng.random() < 0.8),
    lambda rng, name, inc, session, epoch: RolloutComplete(1) if rng.random() < 0.3 else RolloutStarted(2),
    lambda rng, name, inc, session, epoch: rng.choice((Drain(worker=name), Drain(node="n0"), Drain(), Undrain(name))),
    lambda rng, name, inc, session, epoch: rng.choice((Undrain(worker=name), Undrain(node="n0"), Undrain(node="n0"))),
    lambda rng, name, inc, session, epoch: rng.choice((Pause(), Resume(), Resume(), SetThreshold(rng.randint(0, 3)))),
    lambda rng, name, inc, session, epoch: None,
]


def random_sequence(
    rng: random.Random, events: int, taken: Callable[[Machine, Event, str], None] = lambda machine, event, before: None
) -> Machine:
    """One machine, `events` random events. After each the invariants are checked; what was refused must have changed
    nothing. taken(machine, event, before): after each accepted one, with the place of its worker before it."""
    machine = Machine(OPTIONS, term=1, settles_at_s=3.0) if rng.random() < 0.3 else Machine(OPTIONS, term=1)
    now_s = 0.0
    for _ in range(events):
        now_s += rng.choice((0.0, 0.01, 0.1, 0.5))
        if now_s >= machine.next_deadline_s:
            machine.settle(now_s)
        event = random_event(rng, machine)
        before = place(machine, event)
        try:
            if event is not None:
                machine.take(event, now_s)
        except (IllegalTransitionError, UnknownTargetError):
            continue
        if rng.random() < 0.7:  # otherwise together with what comes next
            machine.settle(now_s)
            check_invariants(machine, now_s)
        if event is not None:
            taken(machine, event, before)
    machine.settle(now_s)
    return machine


def place(machine: Machine, event: Event | None) -> str:
    """Where the books have the worker of `event`."""
    worker = machine.roster.workers.get(getattr(event, "worker", ""))
    return "nowhere" if worker is None else f"{worker.state} {worker.phase or ''}".strip()
