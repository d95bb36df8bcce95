"""Workers and sessions, as known to the coordinator. Holds the records and their index; makes no decisions."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from contracts.coordinator import State


class Phase(StrEnum):
    """The phase of a TRAINING worker."""

    STARTING = "starting"  # commanded to train with the current members, not confirmed yet
    RUNNING = "running"  # training confirmed
    STOPPING = "stopping"  # commanded to stop, not confirmed yet


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker. `session` and `phase` are set if and only if state is TRAINING; `answer_by_s` while an answer is
    due."""

    name: str
    incarnation: int
    node: str
    node_id: str = ""
    group: str
    state: State
    heard_s: float
    since_s: float  # in this state
    session: int | None = None
    phase: Phase | None = None
    answer_by_s: float | None = None
    rests_until_s: float = 0.0
    trainer_failures: int = 0
    running: int = 0  # requests
    step: int = 0  # micro-steps of the drafter


@dataclass(slots=True, kw_only=True)
class Session:
    """One training session of one group, named by the epoch in which it began.

    Invariant: it has members, and the first leads. A member with a pending Stop is removed at once, though it stays
    TRAINING until it answers.
    """

    number: int
    group: str
    members: dict[str, None]  # an ordered set
    epoch: int = 0  # of its members
    told: tuple[str, ...] = ()  # members in the last command
    store: str | None = None  # of the leader; None until the leader has created it in this epoch or an earlier one

    @property
    def leader(self) -> str:
        return next(iter(self.members))

    def settled(self, roster: "Roster") -> bool:
        """Return whether all members train in the current epoch, so that others can join."""
        return bool(self.store) and not roster.starting.get(self.group)


@dataclass(slots=True)
class Ghost:
    """A process declared lost while it trained. It may train until its own lease ends at `until_s`."""

    incarnation: int
    group: str
    until_s: float


@dataclass(slots=True, kw_only=True)
class Roster:
    """All workers, in order of registration; by group, the idle ones, the session (at most one) and ghosts."""

    workers: dict[str, Worker] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    drained_workers: set[str] = field(default_factory=set)  # names, registered or not
    drained_nodes: set[str] = field(default_factory=set)  # addresses, and Ray's node ids
    ghosts: dict[str, Ghost] = field(default_factory=dict)
    idle: dict[str, dict[str, None]] = field(default_factory=dict)  # group -> names, longest idle first
    starting: dict[str, set[str]] = field(default_factory=dict)  # group -> names
    stopping: dict[str, set[str]] = field(default_factory=dict)  # group -> names

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self.workers.values()))

    def add(self, worker: Worker) -> None:
        self.workers[worker.name] = worker
        self._index(worker)

    def remove(self, worker: Worker) -> None:
        self.set_phase(worker, None)
        self._unindex(worker)
        del self.workers[worker.name]

    def set_state(self, worker: Worker, state: State, now_s: float) -> None:
        self._unindex(worker)
        worker.state, worker.since_s = state, now_s
        self._index(worker)

    def set_phase(self, worker: Worker, phase: Phase | None) -> None:
        if worker.phase is phase:
            return
        if worker.phase is Phase.STARTING:
            self.starting[worker.group].discard(worker.name)
        elif worker.phase is Phase.STOPPING:
            self.stopping[worker.group].discard(worker.name)
        worker.phase = phase
        if phase is Phase.STARTING:
            self.starting.setdefault(worker.group, set()).add(worker.name)
        elif phase is Phase.STOPPING:
            self.stopping.setdefault(worker.group, set()).add(worker.name)

    def drained(self, worker: Worker) -> bool:
        return worker.name in self.drained_workers or not self.drained_nodes.isdisjoint((worker.node, worker.node_id))

    def session_of(self, worker: Worker) -> Session | None:
        """Return the session of which the worker is a member."""
        session = self.sessions.get(worker.group)
        return session if session is not None and worker.name in session.members else None

    def _index(self, worker: Worker) -> None:
        if worker.state is State.IDLE:
            self.idle.setdefault(worker.group, {})[worker.name] = None

    def _unindex(self, worker: Worker) -> None:
        if worker.state is State.IDLE:
            group = self.idle[worker.group]
            del group[worker.name]
            if not group:
                del self.idle[worker.group]
