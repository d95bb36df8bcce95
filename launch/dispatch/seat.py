"""One rollout worker as the driver sees it: its Ray handle, its state, what is pending and until when.

Owns the state machine of one worker and its Ray calls; never decides about requests (ledger) or restarts (dispatcher).

    STARTING --engine is up, no weights to send--> READY --set_weights--> LOADING --answer--> READY
    STARTING --engine is up, weights to send--> LOADING
    READY --it was told to end--> LEAVING --its requests are back, or the deadline--> lost
    any --lost--> STARTING (restarts left) | DEAD
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar, cast

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.actor import ActorHandle, ActorProxy

from actors.engine.commands import Answered, Command, UpdateWeights
from actors.engine.types import WeightsLoaded
from actors.rollout_worker import RolloutWorker, SupervisorStatus, WorkerEvent
from models.manifest import WeightsManifest

A = TypeVar("A")
WorkerHandle = ActorProxy[RolloutWorker]
Waitable: TypeAlias = "ObjectRef[Any] | ObjectRefGenerator"

FETCH_TIMEOUT_S = 60.0  # to bring one object that exists to this node


def worker_name(index: int) -> str:
    """As which a worker is known to everybody: events, logs, the coordinator."""
    return f"rollout-{index}"


class SeatState(StrEnum):
    STARTING = "starting"
    LOADING = "loading weights"
    READY = "ready"
    LEAVING = "leaving"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Weights:
    """What every worker shall hold. `ref` points to the uint8 buffer."""

    manifest: WeightsManifest
    ref: "ObjectRef[Any]"


@dataclass(slots=True, eq=False, kw_only=True)
class Seat:
    """Times are of the dispatcher's monotonic clock, `*_wall_s` are time.time()."""

    index: int
    name: str
    handle: WorkerHandle
    state: SeatState = SeatState.STARTING
    deadline_s: float = 0.0  # of what is pending (STARTING, LOADING, LEAVING)
    since_wall_s: float = 0.0  # when the state was entered
    progress_s: float = 0.0  # last sign of progress while requests run
    restarts: int = 0
    down_since_wall_s: float | None = None  # lost at; None: up
    reason: str = ""  # why it was lost last, or is about to be
    handed_back: set[int] = field(default_factory=set)  # requests that it has given back (LEAVING)
    pending: "ObjectRef[Any] | None" = None  # answer of restart_engine or UpdateWeights
    stream: ObjectRefGenerator | None = None
    inbox: deque[WorkerEvent] = field(default_factory=deque)  # taken from the stream, not handled yet
    sends: list["ObjectRef[Any]"] = field(default_factory=list)  # commands whose failure must not go unseen

    def waitables(self) -> list[Waitable]:
        found: list[Waitable] = [*self.sends]
        if self.pending is not None:
            found.append(self.pending)
        if self.stream is not None:
            found.append(self.stream)
        return found

    def enter(self, state: SeatState, *, now_s: float, wall_s: float, timeout_s: float = 0.0) -> None:
        self.state = state
        self.since_wall_s = wall_s
        self.progress_s = now_s
        self.deadline_s = now_s + timeout_s

    def start_engine(self) -> None:
        self.sends.clear()
        self.inbox.clear()
        self.stream = None
        self.pending = self.handle.restart_engine.remote()

    def open_stream(self) -> None:
        self.stream = cast(ObjectRefGenerator, self.handle.stream.remote())

    def load(self, weights: Weights) -> None:
        self.pending = self.ask(UpdateWeights(weights.manifest), weights.ref)

    def give(self, command: Command) -> None:
        """A command that must arrive: that it did not is seen by `take_send`."""
        self.sends.append(self.tell(command))

    def tell(self, command: Command, memory: "ObjectRef[Any] | None" = None) -> "ObjectRef[Any]":
        """See RolloutWorker.tell."""
        return cast("ObjectRef[Any]", cast(Any, self.handle).tell.remote(command, memory))

    def ask(self, command: Answered[A], memory: "ObjectRef[Any] | None" = None) -> "ObjectRef[A]":
        """See RolloutWorker.ask."""
        return cast("ObjectRef[A]", cast(Any, self.handle).ask.remote(command, memory))

    def take_answer(self) -> SupervisorStatus | WeightsLoaded:
        """The answer of `pending`, which is ready. Raises what the worker raised, or RayError."""
        assert self.pending is not None
        ref, self.pending = self.pending, None
        return cast(SupervisorStatus | WeightsLoaded, ray.get(ref, timeout=FETCH_TIMEOUT_S))

    def take_events(self) -> list[WorkerEvent] | None:
        """The next events of the stream, which is ready; None: it ended."""
        assert self.stream is not None
        try:
            ref = next(self.stream)
        except StopIteration:
            self.stream = None
            return None
        return cast(list[WorkerEvent], ray.get(ref, timeout=FETCH_TIMEOUT_S))

    def take_send(self, ref: Waitable) -> None:
        """Check a command that has been taken. Raises as `take_answer`."""
        self.sends = [r for r in self.sends if r is not ref]
        ray.get(cast("ObjectRef[Any]", ref), timeout=FETCH_TIMEOUT_S)

    def kill(self) -> None:
        """End the actor process, which takes its engine with it. Never raises, never waits."""
        self.pending = self.stream = None
        self.sends.clear()
        self.inbox.clear()
        ray.kill(cast("ActorHandle[RolloutWorker]", self.handle), no_restart=True)
