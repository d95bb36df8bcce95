"""What a coordinator hears and says. Plain data on the wire (msgspec); no behaviour.

A worker is one rollout instance. `incarnation` counts its starts: of two processes with one name the higher is real.
`term` counts the coordinator's starts. `epoch` is one counter over everything that a coordinator decides: a later
decision has a higher one, across sessions and, as workers report the highest they have seen, across terms. A session
is named by the epoch in which it began.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

Serial = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class State(StrEnum):
    BUSY = "BUSY"  # serving rollout
    IDLE = "IDLE"  # out of work, the engine's memory is released
    TRAINING = "TRAINING"  # the drafter is being updated there, or told to start or to stop


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


# Events of a worker.


class WorkerMessage(_Message, frozen=True):
    """What all of them say first."""

    worker: str
    incarnation: Serial


class Register(WorkerMessage, frozen=True):
    """First message of a worker, and its answer to `Reregister`: the whole truth about it."""

    node: str
    group: str  # data-parallel group: workers of one group can train together
    state: State
    session: Serial = 0  # only, and always, where state is TRAINING
    leader: bool = False  # of that session
    store: str = ""  # of that session, if it leads
    epoch: Serial = 0  # highest it has seen
    running: Count = 0  # requests
    node_id: str = ""  # Ray's: unlike `node`, an address, no later machine has it


class Heartbeat(WorkerMessage, frozen=True):
    """It lives, and what it does. Believed only as far as it agrees with what is known (see `Machine`)."""

    state: State
    session: Serial = 0
    running: Count = 0  # requests, BUSY
    step: Count = 0  # micro-steps of the drafter, TRAINING


class Busy(WorkerMessage, frozen=True):
    """It was given work; if it was training, its trainer has stopped already."""

    running: Count = 0


class Idle(WorkerMessage, frozen=True):
    """Nothing left to decode, memory released."""


class Started(WorkerMessage, frozen=True):
    """The trainer runs with the members of this epoch, or will from its next micro-step on (answer to Train)."""

    session: Serial
    epoch: Serial
    store: str = ""  # host:port of its rendezvous store, if it leads and others may join


class Stopped(WorkerMessage, frozen=True):
    """The trainer stands still and its memory is free (answer to Stop, or of its own accord)."""

    session: Serial


class TrainerFailed(WorkerMessage, frozen=True):
    """The trainer ended by itself, or was killed; the worker is fine and the trainer's memory is free."""

    session: Serial
    reason: str


class Leave(WorkerMessage, frozen=True):
    """The worker says goodbye; its trainer is gone."""


# Events of the driver.


class RolloutStarted(_Message, frozen=True):
    """A rollout is under way. Said again as a heartbeat: it changes nothing then."""

    step: Count
    train: bool = True  # whether the drafter is to be trained in its tail


class RolloutComplete(_Message, frozen=True):
    """Nothing is left to roll out: training ends now."""

    step: Count


# Requests of people.


class Drain(_Message, frozen=True):
    """Promote nothing there any more, and stop what trains. Exactly one of the two names something; `node` is an
    address, or Ray's id."""

    worker: str = ""
    node: str = ""
    reason: str = ""


class Undrain(_Message, frozen=True):
    worker: str = ""
    node: str = ""


class Pause(_Message, frozen=True):
    """No spot training until Resume."""


class Resume(_Message, frozen=True):
    pass


class SetThreshold(_Message, frozen=True):
    idle_workers: int


class Tick(_Message, frozen=True):
    """Time has passed."""


WorkerEvent = Register | Heartbeat | Busy | Idle | Started | Stopped | TrainerFailed | Leave
DriverEvent = RolloutStarted | RolloutComplete
ControlEvent = DriverEvent | Drain | Undrain | Pause | Resume | SetThreshold | Tick
Event = WorkerEvent | ControlEvent


# Commands to a worker.


class Train(_Message, frozen=True):
    """Train with these members from the next micro-step on, leave who is not among them; answer Started.

    members: workers, the leader first; this one's rank is its place. store: the leader's; empty for the leader itself,
    which sets it up and tells in Started.
    """

    worker: str
    term: int
    epoch: int
    session: int
    members: tuple[str, ...]
    store: str = ""


class Stop(_Message, frozen=True):
    """Stop within a micro-step and answer Stopped; whatever still trains after `within_s` is to be killed."""

    worker: str
    term: int
    epoch: int
    session: int
    within_s: float
    reason: str


class Reregister(_Message, frozen=True):
    """The coordinator does not know the worker, or knows that it is mistaken about it: send Register."""

    worker: str
    term: int


Command = Train | Stop | Reregister


# What the coordinator tells whoever watches.


class Changed(_Message, frozen=True):
    """`before` is empty for a new worker, `after` for one that is gone."""

    worker: str
    before: str
    after: str
    reason: str


class Lost(_Message, frozen=True):
    """A worker did not answer in time: it is not waited for."""

    worker: str
    incarnation: int
    reason: str


class SessionChanged(_Message, frozen=True):
    """`members` is empty when the session has ended."""

    group: str
    session: int
    epoch: int
    members: tuple[str, ...]


Notice = Changed | Lost | SessionChanged
Output = Command | Notice
