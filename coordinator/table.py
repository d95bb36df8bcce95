"""The transition table: what a message of a worker does, by the state the coordinator believes it to be in."""

from enum import Enum, auto

from coordinator.events import Busy, Heartbeat, Idle, Leave, Started, State, Stopped, TrainerFailed
from coordinator.roster import Phase


class Edge(Enum):
    IGNORE = auto()  # true already: a repetition, or a sign of life
    RUN = auto()  # the trainer runs; the state stays TRAINING
    TO_BUSY = auto()
    TO_IDLE = auto()
    REMOVE = auto()


_BUSY, _IDLE = (State.BUSY, None), (State.IDLE, None)
_STARTING, _RUNNING, _STOPPING = ((State.TRAINING, phase) for phase in Phase)
_ALL = (_BUSY, _IDLE, _STARTING, _RUNNING, _STOPPING)

_TABLE: dict[tuple[State, Phase | None], dict[type, Edge]] = {
    _BUSY: {
        Busy: Edge.IGNORE,  # sent again, as its answer was lost
        Idle: Edge.TO_IDLE,  # it ran out of work and released its memory
    },
    _IDLE: {
        Idle: Edge.IGNORE,
        Busy: Edge.TO_BUSY,  # new work arrived; nobody was asked
    },
    _STARTING: {
        Started: Edge.RUN,  # the trainer is up
        Busy: Edge.TO_BUSY,  # work came before, or while, the trainer started: work goes first
        TrainerFailed: Edge.TO_IDLE,  # it did not come up; the worker rests and is asked again later
        Stopped: Edge.TO_IDLE,  # it declined: its memory is free
        Idle: Edge.IGNORE,  # sent before the command reached it
    },
    _RUNNING: {
        Started: Edge.IGNORE,
        Busy: Edge.TO_BUSY,  # it stopped unasked, as it was given work
        TrainerFailed: Edge.TO_IDLE,
        Stopped: Edge.TO_IDLE,  # it stopped by itself: nothing left to learn from
        Idle: Edge.IGNORE,
    },
    _STOPPING: {
        Stopped: Edge.TO_IDLE,  # the answer that was owed
        TrainerFailed: Edge.TO_IDLE,  # it was killed or fell over while stopping: the memory is free all the same
        Busy: Edge.TO_BUSY,  # given work; it reports that only once its trainer stands still
        Started: Edge.IGNORE,  # crossed our Stop on the way; the answer to Stop is still owed
        Idle: Edge.IGNORE,  # an older message: memory is known to be free only by Stopped
    },
}
for _place in _ALL:
    _TABLE[_place] |= {Heartbeat: Edge.IGNORE, Leave: Edge.REMOVE}


def edge_for(state: State, phase: Phase | None, event: type) -> Edge | None:
    """What `event` does; None: it cannot happen there."""
    return _TABLE[state, phase].get(event)
