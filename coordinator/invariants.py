"""What must hold of a machine between two steps. Reads, never changes it; costs time in proportion to its workers."""

from coordinator.events import State
from coordinator.machine import Machine
from coordinator.roster import Phase


class BrokenInvariantError(AssertionError):
    """The machine contradicts itself: a bug."""


def check_invariants(machine: Machine, now_s: float) -> None:
    """A worker is in one state, a group in one session, every wait ends. Raises BrokenInvariantError.

    `now_s` must be the time of the last step, or one before the machine's next deadline.
    """
    options, roster, due_s = machine.options, machine.roster, machine.next_deadline_s
    _hold(due_s > now_s, "a deadline has passed")
    longest_s = max(options.start_deadline_s, options.stop_deadline_s)
    idle = 0
    for worker in roster:
        training = worker.state is State.TRAINING
        _hold(training == (worker.session is not None) == (worker.phase is not None), f"{worker} is in two states")
        is_idle = worker.state is State.IDLE
        idle += is_idle
        _hold((worker.name in roster.idle.get(worker.group, ())) == is_idle, f"{worker} is not where it is looked for")
        lease_ends_s = worker.heard_s + options.lease_s
        _hold(now_s < lease_ends_s and due_s <= lease_ends_s, f"nobody will notice when {worker} falls silent")
        owes = worker.phase in (Phase.STARTING, Phase.STOPPING)
        _hold(owes == (worker.answer_by_s is not None), f"{worker} owes an answer without a deadline, or none with one")
        if worker.answer_by_s is not None:
            in_time = now_s < worker.answer_by_s <= now_s + longest_s and due_s <= worker.answer_by_s
            _hold(in_time, f"nobody will notice when {worker} does not answer")
        member = roster.session_of(worker) is not None
        _hold(member == (worker.phase in (Phase.STARTING, Phase.RUNNING)), f"{worker} trains alone or not at all")
    stopping = {worker.name for worker in roster if worker.phase is Phase.STOPPING}
    _hold(set().union(*roster.stopping.values()) == stopping, "the index of stopping workers is wrong")
    _hold(sum(map(len, roster.idle.values())) == idle, "the index of idle workers is wrong")
    for group, session in roster.sessions.items():
        _hold(
            bool(session.members) and len(set(session.members)) == len(session.members), f"{session} is empty or twice"
        )
        _hold(session.epoch <= machine.sessions.epoch, f"{session} is of an epoch that has not been")
        for name in session.members:
            worker = roster.workers[name]
            _hold(worker.group == group == session.group and worker.session == session.number, f"{worker}: {session}")
    if machine.paused or machine.rolling is False:
        _hold(not roster.sessions, "a session where nobody is to train")


def _hold(truth: bool, message: str) -> None:
    if not truth:
        raise BrokenInvariantError(message)
