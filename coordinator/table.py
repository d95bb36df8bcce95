"""Transition table: the effect of a worker's message, by the state in which the coordinator holds the worker.

Answers (Started, Stopped, TrainerFailed) reach the table only if they name the worker's current session; others are
stale and change nothing (see `Machine`). An entry that is missing is an error: a worker's messages arrive in order,
exactly once.
"""

from enum import Enum, auto

from contracts.coordinator import Busy, Heartbeat, Idle, Leave, Started, State, Stopped, TrainerFailed
from coordinator.roster import Phase

Place = tuple[State, Phase | None]


class Edge(Enum):
    IGNORE = auto()  # already true, or superseded: only a sign of life
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
        Busy: Edge.IGNORE,  # more work, or a new count
        Idle: Edge.TO_IDLE,  # it ran out of work and released its memory
        Heartbeat: Edge.IGNORE,
        Leave: Edge.REMOVE,
    },
    IDLE: {
        Idle: Edge.IGNORE,  # its work was so brief that it reports only the end
        Busy: Edge.TO_BUSY,  # new work arrived; the coordinator is not asked
        Heartbeat: Edge.IGNORE,
        Leave: Edge.REMOVE,
    },
    STARTING: {
        Started: Edge.RUN,  # the trainer is up
        Busy: Edge.TO_BUSY,  # work arrived before or while the trainer started: work goes first
        Stopped: Edge.TO_IDLE,  # it declined, or had no data
        TrainerFailed: Edge.TO_IDLE,  # it did not start; the worker rests and is asked again later
        Idle: Edge.IGNORE,  # sent before the command reached it
        Heartbeat: Edge.IGNORE,
        Leave: Edge.REMOVE,
    },
    RUNNING: {
        Started: Edge.IGNORE,  # a repetition
        Busy: Edge.TO_BUSY,  # it stopped without a command, because it received work
        Stopped: Edge.TO_IDLE,  # it stopped by itself: no data left
        TrainerFailed: Edge.TO_IDLE,  # it crashed; the worker rests
        Heartbeat: Edge.IGNORE,
        Leave: Edge.REMOVE,
        # No Idle: a training worker sends Stopped first.
    },
    STOPPING: {
        Stopped: Edge.TO_IDLE,  # the awaited answer
        TrainerFailed: Edge.TO_IDLE,  # killed, or crashed, while stopping: the memory is free anyway
        Busy: Edge.TO_BUSY,  # received work; it reports that only after its trainer has stopped
        Started: Edge.IGNORE,  # crossed Stop on the way; the answer to Stop is still due
        Idle: Edge.IGNORE,  # sent before the command to train arrived: only Stopped says that memory is free
        Heartbeat: Edge.IGNORE,
        Leave: Edge.REMOVE,
    },
}


def edge_for(state: State, phase: Phase | None, event: type) -> Edge | None:
    """Return the edge of `event` in this state; None if it cannot happen there."""
    return TABLE[state, phase].get(event)
