"""The transition table: what a message of a worker does, by the state the coordinator believes it to be in.

Answers (Started, Stopped, TrainerFailed) reach the table only if they name the session the worker trains in: one about
another session is stale, and changes nothing (see `Machine`). What is not in the table cannot happen, as messages of
one worker arrive in the order in which they were sent, once: it is an error.
"""

from enum import Enum, auto

from contracts.coordinator import Busy, Heartbeat, Idle, Leave, Started, State, Stopped, TrainerFailed
from coordinator.roster import Phase

Place = tuple[State, Phase | None]


class Edge(Enum):
    IGNORE = auto()  # true already, or overtaken: a sign of life, nothing more
    RUN = auto()  # the trainer runs; the state stays TRAINING
    TO_BUSY = auto()
    TO_IDLE = auto()
    REMOVE = auto()


BUSY: Place = (State.BUSY, None)
IDLE: Place = (State.IDLE, None)
STARTING: Place = (State.TRAINING, Phase.STARTING)
RUNNING: Place = (State.TRAINING, Phase.RUNNING)
STOPPING: Place = (State.TRAINING, Phase.STOPPING)

TABLE: dict[Place, dict[type, Edge]] = {
    BUSY: {
        Busy: Edge.IGNORE,  # more work, or a new count of it
        Idle: Edge.TO_IDLE,  # it ran out of work and released its memory
        Heartbeat: Edge.IGNORE,
        Leave: Edge.REMOVE,
    },
    IDLE: {
        Idle: Edge.IGNORE,  # it had work so briefly that it reports only the end of it
        Busy: Edge.TO_BUSY,  # new work arrived; nobody was asked
        Heartbeat: Edge.IGNORE,
        Leave: Edge.REMOVE,
    },
    STARTING: {
        Started: Edge.RUN,  # the trainer is up
        Busy: Edge.TO_BUSY,  # work came before, or while, the trainer started: work goes first
        Stopped: Edge.TO_IDLE,  # it declined, or had nothing to learn from
        TrainerFailed: Edge.TO_IDLE,  # it did not come up; the worker rests and is asked again later
        Idle: Edge.IGNORE,  # sent before the command reached it
        Heartbeat: Edge.IGNORE,
        Leave: Edge.REMOVE,
    },
    RUNNING: {
        Started: Edge.IGNORE,  # said twice
        Busy: Edge.TO_BUSY,  # it stopped unasked, as it was given work
        Stopped: Edge.TO_IDLE,  # it stopped by itself: nothing left to learn from
        TrainerFailed: Edge.TO_IDLE,  # it fell over; the worker rests
        Heartbeat: Edge.IGNORE,
        Leave: Edge.REMOVE,
        # No Idle: whoever trains says Stopped first.
    },
    STOPPING: {
        Stopped: Edge.TO_IDLE,  # the answer that was owed
        TrainerFailed: Edge.TO_IDLE,  # it was killed, or fell over, while stopping: the memory is free all the same
        Busy: Edge.TO_BUSY,  # given work; it reports that only once its trainer stands still
        Started: Edge.IGNORE,  # crossed Stop on the way; the answer to Stop is still owed
        Idle: Edge.IGNORE,  # sent before the command to train reached it: only Stopped says that memory is free
        Heartbeat: Edge.IGNORE,
        Leave: Edge.REMOVE,
    },
}


def edge_for(state: State, phase: Phase | None, event: type) -> Edge | None:
    """Return the edge of `event` in this state; None if it cannot happen there."""
    return TABLE[state, phase].get(event)
