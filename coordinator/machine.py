"""The coordinator as a state machine: events and the time in, commands out. No sockets, clock or randomness.

Holds the workers' states, and decides when one is lost. It never assigns rollout work and never delays decoding: a
worker that receives work reports it without asking (TLT 4.2).

Invariants after every step:
  - a worker is in exactly one state; a group has at most one session, whose leader is one of its members;
  - every awaited answer has a deadline; after it, the worker is lost;
  - messages of an older incarnation, and answers about another session or epoch, change nothing;
  - an event without a rule raises IllegalTransitionError and changes nothing.
"""

import math
from typing import assert_never

from config.coordinator import CoordinatorOptions
from contracts.coordinator import (
    Busy,
    Changed,
    ControlEvent,
    Drain,
    Event,
    Heartbeat,
    Idle,
    Lost,
    Output,
    Pause,
    Register,
    Reregister,
    Resume,
    RolloutComplete,
    RolloutStarted,
    SetThreshold,
    Started,
    State,
    Stopped,
    TrainerFailed,
    Undrain,
    WorkerMessage,
)
from coordinator.roster import Ghost, Phase, Roster, Worker
from coordinator.sessions import Sessions
from coordinator.standing import NOTHING, Standing
from coordinator.table import Edge, edge_for


class IllegalTransitionError(ValueError):
    """No rule allows this event in the worker's present state."""


class UnknownTargetError(ValueError):
    """The named worker does not exist, or a value is out of range."""


class Machine:
    """One coordinator.

    term: above that of any earlier coordinator. settles_at_s: the end of a predecessor's workers: all that it commanded
    to train have registered here or stopped by themselves (its end plus `lease_s`). Nobody is promoted until then.
    standing: the predecessor's drains, pause and threshold.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        term: int,
        settles_at_s: float = -math.inf,
        standing: Standing = NOTHING,
    ) -> None:
        self.options, self.term = options, term
        self.roster = Roster()
        self.rollout_step: int | None = None
        self.rolling: bool | None = None  # a rollout with training in its tail is running; None: not reported yet
        self.paused = standing.paused
        self.roster.drained_workers.update(standing.workers)
        self.roster.drained_nodes.update(standing.nodes)
        self.ignored = 0  # stale and repeated messages
        self._settles_at_s = settles_at_s
        self._check_at_s = math.inf  # lower bound of all deadlines: heartbeats postpone theirs without changing it
        self._out: list[Output] = []
        closed = settles_at_s > -math.inf
        self.sessions = Sessions(self.roster, options, term=term, closed=closed, out=self._out)
        if standing.threshold is not None:
            self.sessions.threshold = standing.threshold
        if closed:
            self._due(settles_at_s)

    def step(self, event: Event, now_s: float) -> list[Output]:
        """Call `take`, then `settle`."""
        return self.take(event, now_s) + self.settle(now_s)

    def take(self, event: Event, now_s: float) -> list[Output]:
        """Return the immediate commands for `event` at `now_s` (monotonic seconds, never falling). Raises
        IllegalTransitionError, UnknownTargetError; then nothing has changed.
        """
        self._out.clear()
        if isinstance(event, WorkerMessage):
            self._hear(event, now_s)
        else:
            self._control(event, now_s)
        return list(self._out)

    def settle(self, now_s: float) -> list[Output]:
        """Return the consequences of all events since the last call.

        Each changed session sends its members one command, and idle workers are promoted.
        """
        self._out.clear()
        if now_s >= self.next_deadline_s:
            self._expire(now_s)
        self.sessions.promote(now_s, willing=bool(self.rolling) and not self.paused)
        self.sessions.announce(now_s)
        return list(self._out)

    @property
    def standing(self) -> Standing:
        """Return the standing orders: drains, pause and threshold."""
        threshold = self.sessions.threshold
        return Standing(
            self.paused,
            threshold if threshold != self.options.threshold else None,
            tuple(sorted(self.roster.drained_workers)),
            tuple(sorted(self.roster.drained_nodes)),
        )

    @property
    def next_deadline_s(self) -> float:
        """Return when `settle` is due if nothing else happens; infinite if never."""
        return min(self._check_at_s, self.sessions.due_s)

    # Workers.

    def _hear(self, event: WorkerMessage, now_s: float) -> None:
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
            self._hear_stale(event, worker, now_s)
            return
        edge = edge_for(worker.state, worker.phase, type(event))
        if edge is None:
            raise IllegalTransitionError(f"{worker.name} is {worker.state}: {type(event).__name__} cannot happen there")
        worker.heard_s = max(worker.heard_s, now_s)
        if isinstance(event, Started):
            self._learn(event.epoch)
        match edge:
            case Edge.RUN:
                assert isinstance(event, Started)
                self.ignored += not self.sessions.confirm(worker, event, now_s)
            case Edge.TO_BUSY:
                self.sessions.move(worker, State.BUSY, "it has work", now_s)
            case Edge.TO_IDLE:
                if isinstance(event, TrainerFailed):
                    worker.trainer_failures += 1
                    worker.rests_until_s = now_s + self.options.retry_after_s
                    self._due(worker.rests_until_s)
                self.sessions.move(worker, State.IDLE, _why_idle(event), now_s)
            case Edge.REMOVE:
                self.roster.drained_workers.discard(worker.name)  # a later worker of this name is a different one
                self.sessions.remove(worker, "said goodbye")
            case Edge.IGNORE:
                self.ignored += not isinstance(event, Heartbeat | Busy)
        self._note(event, worker)

    def _note(self, event: WorkerMessage, worker: Worker) -> None:
        """Store what only the status shows. A heartbeat that contradicts the known state requests a Register."""
        if isinstance(event, Busy | Heartbeat):
            worker.running = event.running
        elif isinstance(event, Idle):
            worker.running = 0
        if isinstance(event, Heartbeat):
            worker.step = event.step or worker.step
            if not _agrees(event, worker):
                self._out.append(Reregister(worker.name, self.term))

    def _hear_stale(self, event: Started | Stopped | TrainerFailed, worker: Worker, now_s: float) -> None:
        """Handle an answer about a session that the worker has left, or in which it was declared lost."""
        self._learn(event.session)
        worker.heard_s = max(worker.heard_s, now_s)
        self.ignored += 1
        if isinstance(event, Started):  # it trains where it should not
            self._out.append(Reregister(worker.name, self.term))

    def _register(self, event: Register, known: Worker | None, now_s: float) -> None:
        if known is not None and event.incarnation < known.incarnation:
            self.ignored += 1
            return
        if (event.state is State.TRAINING) != (event.session > 0):
            raise IllegalTransitionError(f"{event.worker} registers as {event.state} with session {event.session}")
        self._learn(max(event.epoch, event.session))
        ghost = self.roster.ghosts.get(event.worker)
        if ghost is not None and ghost.incarnation == event.incarnation:
            del self.roster.ghosts[event.worker]
        worker = known
        if worker is not None and (worker.incarnation, worker.group, worker.node) != _process(event):
            self._haunt(worker, worker.heard_s + self.options.lease_s)
            self.sessions.remove(worker, "started again")
            worker = None
        if worker is None:
            worker = Worker(
                name=event.worker,
                incarnation=event.incarnation,
                node=event.node,
                node_id=event.node_id,
                group=event.group,
                state=event.state,
                heard_s=now_s,
                since_s=now_s,
            )
            if known is not None:
                worker.trainer_failures = known.trainer_failures
            self.roster.add(worker)
            self._due(now_s + self.options.lease_s)
            self.sessions.touch(worker.group)
            self._out.append(Changed(worker.name, "", worker.state, "registered"))
        worker.heard_s = max(worker.heard_s, now_s)
        worker.running = event.running
        if event.state is not State.TRAINING:
            self.sessions.move(worker, event.state, "registered again", now_s)
        elif worker.session == event.session:
            self.sessions.remind(worker)
        else:
            self.sessions.adopt(worker, event, now_s, unwelcome=self._unwelcome(worker))

    def _learn(self, epoch: int) -> None:
        """Skip the numbers that an earlier coordinator has used, up to `epoch`."""
        self.sessions.epoch = max(self.sessions.epoch, epoch)

    def _unwelcome(self, worker: Worker) -> str:
        if self.paused:
            return "spot training is paused"
        if self.roster.drained(worker):
            return "drained"
        told = self.rolling is not None or not self.sessions.closed
        return "no rollout is under way" if told and not self.rolling else ""

    # Events of the driver and of operators.

    def _control(self, event: ControlEvent, now_s: float) -> None:
        match event:
            case RolloutStarted(step, train):
                if self.rolling is not train:
                    self.sessions.touch()
                self.rollout_step, self.rolling = step, train
                if not train:
                    self.sessions.stop_all("no training in this RL step", now_s)
            case RolloutComplete(step):
                self.rollout_step, self.rolling = step, False
                self.sessions.stop_all("the rollout is complete", now_s)
            case Pause():
                self.paused = True
                self.sessions.stop_all("spot training is paused", now_s)
            case Resume():
                self.paused = False
                self.sessions.touch()
            case SetThreshold(idle_workers):
                if idle_workers < 1:
                    raise UnknownTargetError(f"a threshold of {idle_workers} idle workers: it must be at least 1")
                self.sessions.threshold = idle_workers
                self.sessions.touch()
            case Drain(reason=reason):
                for worker in self._mark_drained(event, drained=True):
                    if worker.state is State.TRAINING:
                        self.sessions.stop(worker, reason or "drained", now_s)
            case Undrain():
                self._mark_drained(event, drained=False)
                self.sessions.touch()
            case _:
                assert_never(event)

    def _mark_drained(self, event: Drain | Undrain, *, drained: bool) -> list[Worker]:
        if bool(event.worker) == bool(event.node):
            raise UnknownTargetError("name a worker or a node, one of them")
        if event.node:  # A node may be drained before its first worker registers.
            there = [worker for worker in self.roster if event.node in (worker.node, worker.node_id)]
            if drained:
                self.roster.drained_nodes.add(event.node)
            else:  # An address stands for the node that has it, however that node was drained.
                self.roster.drained_nodes -= {event.node, *(w.node_id for w in there if w.node == event.node)}
            return there
        worker = self.roster.workers.get(event.worker)
        if worker is None and event.worker not in self.roster.drained_workers:  # a drained one may come back
            known = ", ".join(sorted(self.roster.workers)[:20]) or "none"
            raise UnknownTargetError(f"there is no worker {event.worker!r}; registered: {known}")
        (self.roster.drained_workers.add if drained else self.roster.drained_workers.discard)(event.worker)
        return [worker] if worker is not None else []

    # Time.

    def _expire(self, now_s: float) -> None:
        self._check_at_s = self.sessions.due_s = math.inf
        for worker in self.roster:
            lease_ends_s = worker.heard_s + self.options.lease_s
            if worker.answer_by_s is not None and now_s >= worker.answer_by_s:
                what = "start" if worker.phase is Phase.STARTING else "stop"
                self._haunt(worker, now_s + self.options.lease_s)
                self._lose(worker, f"did not {what} training in time")
            elif now_s >= lease_ends_s:
                self._lose(worker, f"silent for {self.options.lease_s:g} s")
            else:
                self._due(lease_ends_s)
                if worker.answer_by_s is not None:
                    self._due(worker.answer_by_s)
                if worker.rests_until_s > now_s:
                    self._due(worker.rests_until_s)
        for name, ghost in list(self.roster.ghosts.items()):
            if now_s >= ghost.until_s:
                del self.roster.ghosts[name]
            else:
                self._due(ghost.until_s)
        if self.sessions.closed:
            if now_s < self._settles_at_s:
                self._due(self._settles_at_s)
            else:
                self.sessions.open()
                if not self.rolling:
                    self.sessions.stop_all("no rollout is under way", now_s)
        self.sessions.touch()  # a rest or a ghost's lease may have ended

    def _due(self, at_s: float) -> None:
        self._check_at_s = min(self._check_at_s, at_s)

    def _lose(self, worker: Worker, reason: str) -> None:
        self._out.append(Lost(worker.name, worker.incarnation, reason))
        self.sessions.remove(worker, reason)

    def _haunt(self, worker: Worker, until_s: float) -> None:
        if worker.state is State.TRAINING:
            self.roster.ghosts[worker.name] = Ghost(worker.incarnation, worker.group, until_s)
            self._due(until_s)


def _process(event: Register) -> tuple[int, str, str]:
    return event.incarnation, event.group, event.node


def _why_idle(event: WorkerMessage) -> str:
    match event:
        case TrainerFailed(reason=reason):
            return f"its trainer failed: {reason}"
        case Stopped():
            return "its trainer stopped"
    return "out of work"


def _agrees(event: Heartbeat, worker: Worker) -> bool:
    if event.state is State.TRAINING:
        return worker.session == event.session
    if worker.state is State.TRAINING:  # the command may not have arrived yet
        return event.state is State.IDLE and worker.phase is not Phase.RUNNING
    return worker.state is event.state
