"""What must hold of a machine between two steps. Reads, never changes it; costs time in proportion to its workers."""

from collections.abc import Iterator

from contracts.coordinator import State
from coordinator.machine import Machine
from coordinator.roster import Phase, Roster, Worker


class BrokenInvariantError(AssertionError):
    """The machine contradicts itself: a bug."""


def check_invariants(machine: Machine, now_s: float) -> None:
    """A worker is in one state, a group in one session, every wait ends. Raises BrokenInvariantError.

    `now_s` must be the time of the last step, or one before the machine's next deadline.
    """
    for contradiction in _contradictions(machine, now_s):
        raise BrokenInvariantError(f"{now_s:.3f}: {contradiction}")


def _contradictions(machine: Machine, now_s: float) -> Iterator[str]:
    roster, due_s = machine.roster, machine.next_deadline_s
    if due_s <= now_s:
        yield "a deadline has passed"
    for worker in roster.workers.values():
        yield from _of_worker(machine, worker, now_s)
    yield from _of_indexes(roster)
    for group, session in roster.sessions.items():
        if not session.members:
            yield f"{session} is empty"
        if session.epoch > machine.sessions.epoch:
            yield f"{session} is of an epoch that has not been"
        for name in session.members:
            member = roster.workers[name]
            if not (member.group == group == session.group and member.session == session.number):
                yield f"{member} is no member of {session}"
    if (machine.paused or machine.rolling is False) and roster.sessions:
        yield "a session where nobody is to train"


def _of_worker(machine: Machine, worker: Worker, now_s: float) -> Iterator[str]:
    options, due_s = machine.options, machine.next_deadline_s
    if not (worker.state is State.TRAINING) == (worker.session is not None) == (worker.phase is not None):
        yield f"{worker} is in two states"
    lease_ends_s = worker.heard_s + options.lease_s
    if not (now_s < lease_ends_s and due_s <= lease_ends_s):
        yield f"nobody will notice when {worker} falls silent"
    if (worker.phase in (Phase.STARTING, Phase.STOPPING)) != (worker.answer_by_s is not None):
        yield f"{worker} owes an answer without a deadline, or none with one"
    if worker.answer_by_s is not None:
        longest_s = max(options.start_deadline_s, options.stop_deadline_s)
        if not (now_s < worker.answer_by_s <= now_s + longest_s and due_s <= worker.answer_by_s):
            yield f"nobody will notice when {worker} does not answer"
    is_member = machine.roster.session_of(worker) is not None
    if is_member != (worker.phase in (Phase.STARTING, Phase.RUNNING)):
        yield f"{worker} trains alone or not at all"


def _of_indexes(roster: Roster) -> Iterator[str]:
    idle = {name for names in roster.idle.values() for name in names}
    if idle != {worker.name for worker in roster.workers.values() if worker.state is State.IDLE}:
        yield f"idle workers are looked for as {idle}"
    for phase, by_group in ((Phase.STARTING, roster.starting), (Phase.STOPPING, roster.stopping)):
        found = {name for names in by_group.values() for name in names}
        if found != {worker.name for worker in roster.workers.values() if worker.phase is phase}:
            yield f"{phase} workers are looked for as {found}"
    for index in (roster.idle, roster.starting, roster.stopping):
        for group, names in index.items():
            for name in names:
                if roster.workers[name].group != group:
                    yield f"{name} is looked for in {group}"
