"""The status of a coordinator: its records, and how they are read from a hub."""

from dataclasses import dataclass, field

from coordinator.hub import Hub


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker as the coordinator sees it. Times are seconds up to the snapshot."""

    name: str
    incarnation: int
    node: str
    group: str
    state: str
    phase: str  # TRAINING only, else empty
    session: int  # 0: none
    running: int  # requests
    step: int  # micro-steps of the drafter
    in_state_s: float
    silent_s: float
    drained: bool
    rests_s: float
    trainer_failures: int


@dataclass(frozen=True, slots=True)
class SessionStatus:
    group: str
    number: int
    epoch: int
    members: tuple[str, ...]  # the leader first


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A coordinator at one moment."""

    term: int
    epoch: int
    uptime_s: float
    endpoint: str
    rollout_step: int | None
    rolling: bool  # a rollout with training in its tail is running
    paused: bool
    settling: bool  # after a restart: no decisions yet
    threshold: int
    workers: tuple[WorkerStatus, ...]
    sessions: tuple[SessionStatus, ...]
    drained_nodes: tuple[str, ...]
    counts: dict[str, int]  # messages and connections by fate


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a worker (`group` empty) or of a session (`worker` empty)."""

    at_s: float  # Unix time
    worker: str = ""
    group: str = ""
    before: str = ""
    after: str = ""
    reason: str = ""
    session: int = 0
    epoch: int = 0
    members: tuple[str, ...] = field(default=())


def read_status(hub: Hub, now_s: float, *, started_s: float, endpoint: str) -> Status:
    """Read the status. Call it on the hub's thread."""
    machine, roster = hub.machine, hub.machine.roster
    workers = tuple(
        WorkerStatus(
            name=worker.name,
            incarnation=worker.incarnation,
            node=worker.node,
            group=worker.group,
            state=worker.state.value,
            phase=worker.phase.value if worker.phase is not None else "",
            session=worker.session or 0,
            running=worker.running,
            step=worker.step,
            in_state_s=now_s - worker.since_s,
            silent_s=now_s - worker.heard_s,
            drained=roster.drained(worker),
            rests_s=max(0.0, worker.rests_until_s - now_s),
            trainer_failures=worker.trainer_failures,
        )
        for worker in roster
    )
    sessions = tuple(SessionStatus(s.group, s.number, s.epoch, tuple(s.members)) for s in roster.sessions.values())
    return Status(
        term=machine.term,
        epoch=machine.sessions.epoch,
        uptime_s=now_s - started_s,
        endpoint=endpoint,
        rollout_step=machine.rollout_step,
        rolling=bool(machine.rolling),
        paused=machine.paused,
        settling=machine.sessions.closed,
        threshold=machine.sessions.threshold,
        workers=workers,
        sessions=sessions,
        drained_nodes=tuple(sorted(roster.drained_nodes)),
        counts=dict(sorted(hub.counts.items())) | {"stale": machine.ignored},
    )
