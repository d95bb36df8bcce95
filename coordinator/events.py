"""What a coordinator hears and says. Plain data on the wire (msgspec); no behaviour.

A worker is one rollout instance. `incarnation` counts its starts: of two processes with one name the higher is real.
`term` counts the coordinator's starts; a worker ignores commands of a lower term than the highest it has seen.
"""

from enum import StrEnum

import msgspec


class State(StrEnum):
    BUSY = "BUSY"  # serving rollout
    IDLE = "IDLE"  # out of work, the engine's memory is released
    TRAINING = "TRAINING"  # the drafter is being updated there, or told to start or to stop


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


# Events of a worker.


class Register(_Message, frozen=True):
    """First message of a worker, and its answer to `Reregister`. It tells what it is, not what it should be."""

    worker: str
    incarnation: int
    node: str
    group: str  # data-parallel group: workers of one group can train together
    state: State
    session: int = 0  # only where state is TRAINING
    leader: bool = False
    term: int = 0  # highest it has seen


class Heartbeat(_Message, frozen=True):
    worker: str
    incarnation: int


class Busy(_Message, frozen=True):
    """It was given work; if it was training, it has stopped already."""

    worker: str
    incarnation: int


class Idle(_Message, frozen=True):
    """Nothing left to decode, memory released."""

    worker: str
    incarnation: int


class Started(_Message, frozen=True):
    """The trainer runs (answer to Lead or Join)."""

    worker: str
    incarnation: int
    session: int


class Stopped(_Message, frozen=True):
    """The trainer stands still and its memory is free (answer to Stop)."""

    worker: str
    incarnation: int
    session: int


class TrainerFailed(_Message, frozen=True):
    """The trainer ended by itself; the worker is fine."""

    worker: str
    incarnation: int
    session: int
    reason: str


class Leave(_Message, frozen=True):
    """The worker says goodbye."""

    worker: str
    incarnation: int


# Events of the driver and of people.


class RolloutStarted(_Message, frozen=True):
    step: int


class RolloutComplete(_Message, frozen=True):
    step: int


class Drain(_Message, frozen=True):
    """Promote nothing there any more, and stop what trains. Exactly one of the two names something."""

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
ControlEvent = RolloutStarted | RolloutComplete | Drain | Undrain | Pause | Resume | SetThreshold | Tick
Event = WorkerEvent | ControlEvent


# Commands to a worker. `epoch` counts the changes of a session's members.


class Lead(_Message, frozen=True):
    """Set up (or take over) a session and train; `members` includes the worker."""

    worker: str
    term: int
    session: int
    epoch: int
    members: tuple[str, ...]


class Join(_Message, frozen=True):
    """Train in a session that `leader` leads, from its next micro-step on."""

    worker: str
    term: int
    session: int
    epoch: int
    leader: str


class Members(_Message, frozen=True):
    """To the leader: who belongs to the session from the next micro-step on."""

    worker: str
    term: int
    session: int
    epoch: int
    members: tuple[str, ...]


class Stop(_Message, frozen=True):
    """Stop within a micro-step and answer Stopped; whatever still trains after `within_s` is killed."""

    worker: str
    term: int
    session: int
    within_s: float
    reason: str


class Reregister(_Message, frozen=True):
    """The coordinator does not know the worker: send Register."""

    worker: str
    term: int


# What the coordinator tells whoever watches.


class Changed(_Message, frozen=True):
    """`after` is empty when the worker is gone."""

    worker: str
    before: str
    after: str
    reason: str


class Lost(_Message, frozen=True):
    """A worker did not answer in time: it is not waited for. Its supervisor must kill its trainer."""

    worker: str
    incarnation: int
    reason: str


Command = Lead | Join | Members | Stop | Reregister | Changed | Lost
