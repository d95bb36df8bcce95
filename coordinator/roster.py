"""Workers and sessions as the coordinator believes them to be. Owns the records; decides nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from coordinator.events import State


class Phase(StrEnum):
    """Where a TRAINING worker is."""

    STARTING = "starting"  # told to train, not heard yet
    RUNNING = "running"
    STOPPING = "stopping"  # told to stop, not heard yet


@dataclass(slots=True)
class Worker:
    """One worker. `session` and `phase` are set exactly while state is TRAINING; `answer_by_s` while one is owed."""

    name: str
    incarnation: int
    node: str
    group: str
    state: State
    heard_s: float
    session: int | None = None
    phase: Phase | None = None
    answer_by_s: float | None = None
    rests_until_s: float = 0.0
    drained: bool = False  # itself; its node may be drained besides
    trainer_failures: int = 0


@dataclass(slots=True)
class Session:
    """One training session of one group. Invariant: the leader is a member; members that were told to stop are not
    members any more, though they are still TRAINING until they answer."""

    number: int
    group: str
    leader: str
    members: list[str] = field(default_factory=list)  # in order of joining
    epoch: int = 0


class Roster:
    """All workers and sessions, in order of registration."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.sessions: dict[str, Session] = {}  # by group: at most one each
        self.drained_nodes: set[str] = set()

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self.workers.values()))

    def drained(self, worker: Worker) -> bool:
        return worker.drained or worker.node in self.drained_nodes

    def session_of(self, worker: Worker) -> Session | None:
        """The session it is a member of."""
        session = self.sessions.get(worker.group)
        return session if session is not None and worker.name in session.members else None
