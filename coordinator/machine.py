"""The coordinator as a state machine: events and the time in, commands out. No sockets, clock or randomness.

Owns what is believed about workers and which of them train. It never assigns rollout work, and nothing that decodes
ever waits for it: a worker that is given work reports it, it does not ask (design.md sections 3 and 5; TLT 4.2).

Rules that hold after every step, whatever came in:
  - a worker is in exactly one state; a group has at most one session, whose leader is one of its members;
  - a worker owes an answer only until a deadline, after which it is lost: no wait is without end;
  - messages of an older incarnation, and answers about another session, change nothing;
  - what no rule allows raises IllegalTransitionError and changes nothing.
"""

import math

from coordinator.events import (
    Changed,
    Command,
    Drain,
    Event,
    Heartbeat,
    Join,
    Lead,
    Lost,
    Members,
    Pause,
    Register,
    Reregister,
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
    WorkerEvent,
)
from coordinator.options import CoordinatorOptions
from coordinator.roster import Phase, Roster, Session, Worker
from coordinator.table import Edge, edge_for


class IllegalTransitionError(ValueError):
    """An event that no rule allows in the worker's present state."""


class UnknownTargetError(ValueError):
    """A request about a worker or node that is not there, or a value out of range."""


class Machine:
    """`term` must be higher than that of any coordinator before (of a restarted one: the clock will do)."""

    def __init__(self, options: CoordinatorOptions, *, term: int) -> None:
        self.options, self.term = options, term
        self.roster = Roster()
        self.threshold = options.idle_workers
        self.rolling = False  # a rollout is under way: only then is there a tail to train in
        self.paused = False
        self.ignored = 0  # stale and repeated messages
        self._sessions_made = 0
        self._check_at_s = math.inf  # no deadline is earlier; heartbeats move theirs later without moving this
        self._reconsider = False  # something that promotion depends on has changed
        self._out: list[Command] = []

    def step(self, event: Event, now_s: float) -> list[Command]:
        """What follows from `event` at `now_s` (monotonic seconds, never falling). Raises IllegalTransitionError,
        UnknownTargetError; then nothing has changed."""
        self._out = []
        if isinstance(event, WorkerEvent):
            self._hear(event, now_s)
        else:
            self._control(event, now_s)
        self._expire(now_s)
        self._promote(now_s)
        out, self._out = self._out, []
        return out

    @property
    def next_deadline_s(self) -> float:
        """When a Tick is due, if nothing else happens; infinite if never."""
        return self._check_at_s

    # Workers.

    def _hear(self, event: WorkerEvent, now_s: float) -> None:
        worker = self.roster.workers.get(event.worker)
        if isinstance(event, Register):
            self._register(event, worker, now_s)
            return
        if worker is None or event.incarnation > worker.incarnation:
            self._out.append(Reregister(event.worker, self.term))
            return
        if event.incarnation < worker.incarnation:
            self.ignored += 1
            return
        if isinstance(event, Started | Stopped | TrainerFailed) and event.session != worker.session:
            worker.heard_s = max(worker.heard_s, now_s)
            self.ignored += 1  # an answer about a session it has left
            return
        edge = edge_for(worker.state, worker.phase, type(event))
        if edge is None:
            raise IllegalTransitionError(f"{worker.name} is {worker.state}: {type(event).__name__} cannot happen there")
        worker.heard_s = max(worker.heard_s, now_s)
        if edge is Edge.IGNORE:
            self.ignored += not isinstance(event, Heartbeat)
        elif edge is Edge.RUN:
            worker.phase, worker.answer_by_s = Phase.RUNNING, None
        elif edge is Edge.REMOVE:
            self._remove(worker, "said goodbye")
        else:
            reason = event.reason if isinstance(event, TrainerFailed) else type(event).__name__.lower()
            if isinstance(event, TrainerFailed):
                worker.trainer_failures += 1
                worker.rests_until_s = now_s + self.options.retry_after_s
                self._due(worker.rests_until_s)
            self._move(worker, State.BUSY if edge is Edge.TO_BUSY else State.IDLE, reason)

    def _register(self, event: Register, known: Worker | None, now_s: float) -> None:
        if known is not None and event.incarnation < known.incarnation:
            self.ignored += 1
            return
        if (event.state is State.TRAINING) != (event.session > 0):
            raise IllegalTransitionError(f"{event.worker} registers as {event.state} with session {event.session}")
        drained = known.drained if known is not None else False
        if known is not None and (event.incarnation > known.incarnation or event.group != known.group):
            self._remove(known, "started again")
            known = None
        state = event.state
        session = self.roster.sessions.get(event.group)
        if known is None:
            worker = Worker(event.worker, event.incarnation, event.node, event.group, state, now_s, drained=drained)
            self.roster.workers[worker.name] = worker
            self._due(now_s + self.options.lease_s)
            self._reconsider = True
            self._out.append(Changed(worker.name, "", state, "registered"))
        else:
            worker = known
            worker.heard_s = max(worker.heard_s, now_s)
            same = worker.state is state and (state is not State.TRAINING or worker.session == event.session)
            if same:
                return
            self._quit_session(worker)
            worker.phase = worker.session = worker.answer_by_s = None
            self._set(worker, state, "registered again")
        if state is State.TRAINING:
            self._adopt(worker, event, session, now_s)

    def _adopt(self, worker: Worker, event: Register, session: Session | None, now_s: float) -> None:
        """It trains in a session that a coordinator before this one (or a lost message) has made."""
        worker.session, worker.phase = event.session, Phase.RUNNING
        if session is None:
            session = Session(event.session, worker.group, leader=worker.name, epoch=1)
            self.roster.sessions[worker.group] = session
            self._sessions_made = max(self._sessions_made, event.session)
        if session.number != event.session:
            self._stop(worker, "the group trains in another session", now_s)
            return
        if worker.name not in session.members:
            session.members.append(worker.name)
            session.epoch += 1
        if event.leader:
            session.leader = worker.name
        self._tell_leader(session)

    # The driver and people.

    def _control(self, event: Event, now_s: float) -> None:
        self._reconsider |= not isinstance(event, Tick)
        match event:
            case RolloutStarted():
                self.rolling = True
            case RolloutComplete():
                self.rolling = False
                self._stop_all("the rollout is complete", now_s)
            case Pause():
                self.paused = True
                self._stop_all("spot training is paused", now_s)
            case Resume():
                self.paused = False
            case SetThreshold(idle_workers):
                if idle_workers < 1:
                    raise UnknownTargetError(f"a threshold of {idle_workers} idle workers: it must be at least 1")
                self.threshold = idle_workers
            case Drain(reason=reason):
                for worker in self._mark_drained(event, drained=True):
                    if worker.state is State.TRAINING and worker.phase is not Phase.STOPPING:
                        self._stop(worker, reason or "drained", now_s)
            case Undrain():
                self._mark_drained(event, drained=False)
            case Tick():
                pass

    def _mark_drained(self, event: Drain | Undrain, *, drained: bool) -> list[Worker]:
        if bool(event.worker) == bool(event.node):
            raise UnknownTargetError("name a worker or a node, one of them")
        if event.node:  # A node may be drained before its first worker registers.
            (self.roster.drained_nodes.add if drained else self.roster.drained_nodes.discard)(event.node)
            return [worker for worker in self.roster if worker.node == event.node]
        worker = self.roster.workers.get(event.worker)
        if worker is None:
            known = ", ".join(sorted(self.roster.workers)) or "none"
            raise UnknownTargetError(f"there is no worker {event.worker!r}; registered: {known}")
        worker.drained = drained
        return [worker]

    # Time.

    def _expire(self, now_s: float) -> None:
        if now_s < self._check_at_s:
            return
        self._check_at_s = math.inf
        for worker in self.roster:
            if worker.answer_by_s is not None and now_s >= worker.answer_by_s:
                what = "start" if worker.phase is Phase.STARTING else "stop"
                self._lose(worker, f"did not {what} training in time")
            elif now_s >= worker.heard_s + self.options.lease_s:
                self._lose(worker, f"silent for {self.options.lease_s:g} s")
            else:
                self._due(worker.heard_s + self.options.lease_s)
                if worker.answer_by_s is not None:
                    self._due(worker.answer_by_s)
                if worker.rests_until_s > now_s:
                    self._due(worker.rests_until_s)
        self._reconsider = True  # somebody may have rested enough

    def _due(self, at_s: float) -> None:
        self._check_at_s = min(self._check_at_s, at_s)

    def _lose(self, worker: Worker, reason: str) -> None:
        self._out.append(Lost(worker.name, worker.incarnation, reason))
        self._remove(worker, reason)

    # Sessions.

    def _promote(self, now_s: float) -> None:
        """Idle workers join their group's session, or begin one where enough of them are idle."""
        if not self._reconsider:
            return
        self._reconsider = False
        if not self.rolling or self.paused:
            return
        idle: dict[str, list[Worker]] = {}
        for worker in self.roster:
            if worker.state is State.IDLE and not self.roster.drained(worker) and now_s >= worker.rests_until_s:
                idle.setdefault(worker.group, []).append(worker)
        for group, workers in idle.items():
            session = self.roster.sessions.get(group)
            if session is None:
                if len(workers) < self.threshold:
                    continue
                leader = workers.pop(0)
                self._sessions_made += 1
                session = Session(self._sessions_made, group, leader.name, [leader.name], epoch=1)
                self.roster.sessions[group] = session
                self._begin(leader, session, now_s)
                self._out.append(Lead(leader.name, self.term, session.number, 1, (leader.name,)))
            for worker in workers:
                session.members.append(worker.name)
                session.epoch += 1
                self._begin(worker, session, now_s)
                self._out.append(Join(worker.name, self.term, session.number, session.epoch, session.leader))
            if workers:
                self._tell_leader(session)

    def _begin(self, worker: Worker, session: Session, now_s: float) -> None:
        worker.session, worker.phase = session.number, Phase.STARTING
        worker.answer_by_s = now_s + self.options.start_timeout_s
        self._due(worker.answer_by_s)
        self._set(worker, State.TRAINING, f"session {session.number}")

    def _stop(self, worker: Worker, reason: str, now_s: float) -> None:
        assert worker.session is not None
        within_s = self.options.stop_timeout_s
        number = worker.session
        self._quit_session(worker)
        worker.phase, worker.answer_by_s = Phase.STOPPING, now_s + within_s
        self._due(worker.answer_by_s)
        self._out.append(Stop(worker.name, self.term, number, within_s, reason))

    def _stop_all(self, reason: str, now_s: float) -> None:
        self.roster.sessions.clear()  # at once: nobody is to lead what is ending
        for worker in self.roster:
            if worker.state is State.TRAINING and worker.phase is not Phase.STOPPING:
                self._stop(worker, reason, now_s)

    def _quit_session(self, worker: Worker) -> None:
        """Take a worker out of its session; the first of the others leads where it did."""
        session = self.roster.session_of(worker)
        if session is None:
            return
        session.members.remove(worker.name)
        session.epoch += 1
        if not session.members:
            del self.roster.sessions[session.group]
        elif session.leader == worker.name:
            session.leader = session.members[0]
            heir = (session.leader, self.term, session.number, session.epoch, tuple(session.members))
            self._out.append(Lead(*heir))
        else:
            self._tell_leader(session)

    def _tell_leader(self, session: Session) -> None:
        members = tuple(session.members)
        self._out.append(Members(session.leader, self.term, session.number, session.epoch, members))

    # Records.

    def _move(self, worker: Worker, state: State, reason: str) -> None:
        self._quit_session(worker)
        worker.session = worker.phase = worker.answer_by_s = None
        self._set(worker, state, reason)

    def _set(self, worker: Worker, state: State, reason: str) -> None:
        if worker.state is not state:
            self._out.append(Changed(worker.name, worker.state, state, reason))
            worker.state = state
            self._reconsider = True

    def _remove(self, worker: Worker, reason: str) -> None:
        self._quit_session(worker)
        del self.roster.workers[worker.name]
        self._out.append(Changed(worker.name, worker.state, "", reason))
