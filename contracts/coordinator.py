"""Messages to and from a coordinator. Plain data on the wire (msgspec); no behaviour.

A worker is one rollout instance. `incarnation` counts its starts: of two processes with one name, the higher one is
current. `term` counts the coordinator's starts. `epoch` is one counter over all decisions of a coordinator. A later
decision has a higher epoch, across sessions. It also grows across terms, since workers report the highest epoch they
have seen. A session's id is the epoch in which it began.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

Serial = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class State(StrEnum):
    BUSY = "BUSY"  # has rollout requests
    IDLE = "IDLE"  # has no work; the engine's memory is released
    TRAINING = "TRAINING"  # trains the drafter, or was commanded to start or stop


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


# Events from a worker.


class WorkerMessage(_Message, frozen=True):
    """Fields common to all messages of a worker."""

    worker: str
    incarnation: Serial


class Register(WorkerMessage, frozen=True):
    """First message of a worker, and its answer to `Reregister`: its complete state."""

    node: str
    group: str  # data-parallel group: only workers of one group train together
    state: State
    session: Serial = 0  # set if and only if state is TRAINING
    leader: bool = False  # whether it leads that session
    store: str = ""  # rendezvous store of that session, if it leads
    epoch: Serial = 0  # highest epoch it has seen
    running: Count = 0  # requests
    node_id: str = ""  # Ray's node id: unlike `node`, an address, it is never reused


class Heartbeat(WorkerMessage, frozen=True):
    """Liveness and current state. Accepted only where consistent with the known state (see `Machine`)."""

    state: State
    session: Serial = 0
    running: Count = 0  # requests, BUSY
    step: Count = 0  # micro-steps of the drafter, TRAINING


class Busy(WorkerMessage, frozen=True):
    """The worker received requests. If it was training, its trainer has already stopped."""

    running: Count = 0


class Idle(WorkerMessage, frozen=True):
    """The worker has nothing left to decode and released its memory."""


class Started(WorkerMessage, frozen=True):
    """Answer to Train: the trainer runs with the members of this epoch, or will from its next micro-step on."""

    session: Serial
    epoch: Serial
    store: str = ""  # host:port of its rendezvous store, if it leads and others may join


class Stopped(WorkerMessage, frozen=True):
    """The trainer has stopped and released its memory: the answer to Stop, or unrequested."""

    session: Serial


class TrainerFailed(WorkerMessage, frozen=True):
    """The trainer crashed or was killed. The worker is healthy and the trainer's memory is free."""

    session: Serial
    reason: str


class Leave(WorkerMessage, frozen=True):
    """The worker leaves; its trainer is gone."""


# Events from the driver.


class RolloutStarted(_Message, frozen=True):
    """A rollout is running. Repeated as a heartbeat, which changes nothing."""

    step: Count
    train: bool = True  # whether to train the drafter in its tail


class RolloutComplete(_Message, frozen=True):
    """The rollout is finished: training ends now."""

    step: Count


# Requests from operators.


class Drain(_Message, frozen=True):
    """Start no training there any more and stop what trains. Set exactly one of `worker` and `node`; `node` is an
    address or Ray's node id."""

    worker: str = ""
    node: str = ""
    reason: str = ""


class Undrain(_Message, frozen=True):
    worker: str = ""
    node: str = ""


class Pause(_Message, frozen=True):
    """Allow no spot training until Resume."""


class Resume(_Message, frozen=True):
    pass


class SetThreshold(_Message, frozen=True):
    idle_workers: int


WorkerEvent = Register | Heartbeat | Busy | Idle | Started | Stopped | TrainerFailed | Leave
DriverEvent = RolloutStarted | RolloutComplete
ControlEvent = DriverEvent | Drain | Undrain | Pause | Resume | SetThreshold
Event = WorkerEvent | ControlEvent


# Commands to a worker.


class Train(_Message, frozen=True):
    """Train with these members from the next micro-step on, without any other; answer Started.

    members: workers, the leader first; a worker's rank is its index. store: the leader's rendezvous store; empty for
    the leader itself, which creates it and reports it in Started.
    """

    worker: str
    term: int
    epoch: int
    session: int
    members: tuple[str, ...]
    store: str = ""


class Stop(_Message, frozen=True):
    """Stop within a micro-step and answer Stopped. A trainer still running after `within_s` is to be killed."""

    worker: str
    term: int
    epoch: int
    session: int
    within_s: float
    reason: str


class Reregister(_Message, frozen=True):
    """Send Register: the coordinator does not know the worker, or found its report inconsistent."""

    worker: str
    term: int


Command = Train | Stop | Reregister


# Notices from the coordinator to observers.


class Changed(_Message, frozen=True):
    """A worker changed state. `before` is empty for a new worker, `after` for one that is gone."""

    worker: str
    before: str
    after: str
    reason: str


class Lost(_Message, frozen=True):
    """A worker missed its deadline; nobody waits for it."""

    worker: str
    incarnation: int
    reason: str


class SessionChanged(_Message, frozen=True):
    """A session's members changed. `members` is empty when the session has ended."""

    group: str
    session: int
    epoch: int
    members: tuple[str, ...]


Notice = Changed | Lost | SessionChanged
Output = Command | Notice
