"""A worker's end of its link: its state, the received commands, and which of them are still valid. No sockets, no
clock.

Rules for void commands:
  - one of a lower term, or of an epoch not above the last obeyed one, is stale or a repetition;
  - one to train, sent before the coordinator received the latest change here, is void; it is repeated if still due;
  - a worker with work, or without an acknowledgement for nearly a lease, never trains.
The last rule makes it safe to lose the coordinator: a worker that it declares lost has stopped training by then.
"""

import math
from dataclasses import dataclass
from zlib import crc32

from config.coordinator import CoordinatorOptions
from contracts.coordinator import (
    Busy,
    Command,
    Heartbeat,
    Idle,
    Leave,
    Register,
    Reregister,
    Started,
    State,
    Stop,
    Stopped,
    Train,
    TrainerFailed,
    WorkerEvent,
)
from coordinator.link import Outlink
from coordinator.wire import Ack, Say, Tell


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker. `incarnation` must exceed that of any earlier process of this name (a start time suffices)."""

    name: str
    incarnation: int
    node: str
    group: str = "all"  # data-parallel group
    node_id: str = ""  # Ray's


class Member:
    """One worker. It starts BUSY. Reports that do not fit its state are late and have no effect."""

    def __init__(self, identity: Identity, options: CoordinatorOptions, now_s: float) -> None:
        self.identity, self._options = identity, options
        self.state = State.BUSY
        self.session = 0  # while TRAINING
        self.term = 0
        self.epoch = 0  # highest seen
        self.running = self.step = 0
        self.error = ""  # of the last report that the coordinator refused
        self._obeyed = (0, 0)  # term, epoch
        self._works = True  # has requests; may differ from being BUSY only while TRAINING
        self._leads = False
        self._store = ""
        self._fenced = False
        self._opened = self._changed = -1  # numbers of the last Register, and of the last change of state
        self._link = Outlink(identity.incarnation, -math.inf)
        self._out: list[Say] = []
        self._commands: list[Train | Stop] = []
        share = crc32(identity.name.encode()) / 2**32  # spreads the heartbeats of workers that start together
        self._beat_at_s = now_s + options.heartbeat_s * share
        self._register(now_s)

    # Reports of the worker.

    def busy(self, running: int, now_s: float) -> None:
        """Report new work. If a trainer runs, a Stop follows, and `stopped` ends in BUSY."""
        self.running, self._works = running, True
        if self.state is State.IDLE:
            self._become(State.BUSY, Busy(*self._me, running), now_s)
        elif self.state is State.TRAINING:
            self._stop_here("it has work")

    def idle(self, now_s: float) -> None:
        """Report that nothing is left to decode and memory is released."""
        self.running, self._works = 0, False
        if self.state is State.BUSY:
            self._become(State.IDLE, Idle(*self._me), now_s)

    def started(self, session: int, epoch: int, store: str, now_s: float) -> None:
        """Report that the trainer has the members of `epoch`. store: host:port of its rendezvous store, if it leads."""
        if self._trains_in(session):
            self._store = store
            self._say(Started(*self._me, session, epoch, store), now_s)

    def stopped(self, session: int, now_s: float) -> None:
        """Report that the trainer has stopped and its memory is free."""
        if self._trains_in(session):
            self._trainer_gone(Stopped(*self._me, session), now_s)

    def trainer_failed(self, session: int, reason: str, now_s: float) -> None:
        if self._trains_in(session):
            self._trainer_gone(TrainerFailed(*self._me, session, reason[:1000]), now_s)

    def leave(self, now_s: float) -> None:
        self._become(State.BUSY, Leave(*self._me), now_s)

    # The link.

    @property
    def due_s(self) -> float:
        """Return when `tick` has something to do."""
        fence_s = self._fence_s if self.state is State.TRAINING and not self._fenced else math.inf
        return min(self._beat_at_s, self._link.due_s, fence_s)

    def connected(self, now_s: float) -> bool:
        """Return whether the coordinator has acknowledged a message lately."""
        return now_s < self._fence_s

    def take(self) -> list[Say]:
        """Return the messages to send, and forget them."""
        out, self._out = self._out, []
        return out

    def commands(self) -> list[Train | Stop]:
        """Return the commands that still hold, oldest first."""
        commands, self._commands = self._commands, []
        return [command for command in commands if self._trains_in(command.session)]

    def hear(self, message: Ack | Tell, now_s: float) -> None:
        if message.incarnation != self.identity.incarnation:
            return  # meant for an earlier process of this name
        if isinstance(message, Ack):
            self.term = max(self.term, message.term)
            self.error = message.error or self.error
            self._link.hear(message, now_s)
            self._fenced &= not self.connected(now_s)
            return
        command = message.command
        if command.worker != self.identity.name or command.term < self.term:
            return
        self.term = command.term
        if isinstance(command, Reregister):
            if message.heard >= self._opened:
                self._register(now_s)
        elif (command.term, command.epoch) > self._obeyed:
            self._obey(command, message.heard, now_s)

    def tick(self, now_s: float) -> None:
        """Do what is due. Call it at `due_s`; calls at other times have no effect."""
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self._options.heartbeat_s
            if not self._link.waits:  # a repeated message is a sign of life already
                self._say(Heartbeat(*self._me, self.state, self.session, self.running, self.step), now_s)
        self._out += self._link.repeats(now_s)
        if self.state is State.TRAINING and not self._fenced and now_s >= self._fence_s:
            self._fenced = True
            self._stop_here(f"the coordinator has not answered for {now_s - self._link.alive_s:.1f} s")

    def _obey(self, command: Train | Stop, heard: int, now_s: float) -> None:
        if isinstance(command, Train):
            if heard < self._changed or self._works or not self.connected(now_s):
                return
            self._see(command)
            leads = command.members[0] == self.identity.name
            if not (leads and self._leads and self.session == command.session):
                self._store = ""  # it must create a store, or use the leader's
            self.state, self.session, self._leads = State.TRAINING, command.session, leads
            self._commands.append(command)
        elif self._trains_in(command.session):
            self._see(command)
            self._commands.append(command)
        elif self.state is State.IDLE:  # the command to train never arrived, or was void
            self._see(command)
            self._say(Stopped(*self._me, command.session), now_s)

    def _stop_here(self, reason: str) -> None:
        """Issue a Stop that the coordinator did not send."""
        within_s = self._options.stop_deadline_s
        self._commands.append(Stop(self.identity.name, self.term, self.epoch, self.session, within_s, reason))

    def _trainer_gone(self, event: Stopped | TrainerFailed, now_s: float) -> None:
        if self._works:
            self._become(State.BUSY, Busy(*self._me, self.running), now_s)
        else:
            self._become(State.IDLE, event, now_s)

    def _see(self, command: Command) -> None:
        assert not isinstance(command, Reregister)
        self._obeyed = (command.term, command.epoch)
        self.epoch = max(self.epoch, command.epoch)

    @property
    def _fence_s(self) -> float:
        """When to stop training, so that it has ended before the coordinator declares this worker lost."""
        return self._link.alive_s + self._options.lease_s - self._options.stop_deadline_s

    @property
    def _me(self) -> tuple[str, int]:
        return self.identity.name, self.identity.incarnation

    def _trains_in(self, session: int) -> bool:
        return self.state is State.TRAINING and self.session == session

    def _become(self, state: State, event: WorkerEvent, now_s: float) -> None:
        self.state, self.session, self._leads, self._store = state, 0, False, ""
        self._say(event, now_s)
        self._changed = self._link.number

    def _register(self, now_s: float) -> None:
        who = self.identity
        self._say(
            Register(
                *self._me,
                who.node,
                who.group,
                self.state,
                self.session,
                self._leads,
                self._store,
                self.epoch,
                self.running,
                who.node_id,
            ),
            now_s,
        )
        self._opened = self._changed = self._link.number

    def _say(self, event: WorkerEvent, now_s: float) -> None:
        self._out.append(self._link.say(event, now_s))
