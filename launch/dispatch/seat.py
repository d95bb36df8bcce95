"""One rollout worker as the driver sees it: its Ray handle, its state, what is pending and until when.

Owns the state machine of one worker and its Ray calls; never decides about requests (ledger) or restarts (dispatcher).

    STARTING --engine is up, no weights to send--> READY --set_weights--> LOADING --answer--> READY
    STARTING --engine is up, weights to send--> LOADING (nothing pending: it waits for a hand-over's end)
    any --it was told to end, or to leave--> LEAVING --its requests are back, or the deadline--> lost | CLOSING
    any --lost--> STARTING (restarts left) | DEAD
    CLOSING --its engine is closed, or the deadline--> gone
"""

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar, cast

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayError, RayTaskError

from actors.engine.commands import Answered, Command, ReceiveWeights, Sleep, UpdateWeights
from actors.engine.process import EngineStartError
from actors.engine.types import WeightsLoaded
from actors.handoff.types import Offer
from actors.rollout_worker import RolloutWorker, SupervisorStatus, WorkerEvent
from launch.dispatch.spans import WorkerSpans
from models.manifest import WeightsManifest

A = TypeVar("A")
WorkerHandle = ActorProxy[RolloutWorker]
Waitable: TypeAlias = "ObjectRef[Any] | ObjectRefGenerator"

FETCH_TIMEOUT_S = 60.0  # to bring one object that exists to this node


def worker_name(index: int) -> str:
    """As which the workers that a run starts with are known to everybody: events, logs, the coordinator."""
    return f"rollout-{index}"


class SeatState(StrEnum):
    STARTING = "starting"
    LOADING = "loading weights"
    READY = "ready"
    LEAVING = "leaving"
    CLOSING = "closing"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Weights:
    """What every worker shall hold. `ref` points to the uint8 buffer."""

    manifest: WeightsManifest
    ref: "ObjectRef[Any]"


@dataclass(slots=True, eq=False, kw_only=True)
class Seat:
    """Times are of the dispatcher's monotonic clock, `*_wall_s` are time.time()."""

    name: str
    handle: WorkerHandle
    spans: WorkerSpans
    awaited: "dict[Waitable, Seat]"  # by all seats: whose answer or stream it is
    state: SeatState = SeatState.STARTING
    deadline_s: float = 0.0  # of what is pending (STARTING, LOADING, LEAVING, CLOSING)
    since_wall_s: float = 0.0  # when the state was entered
    progress_s: float = 0.0  # last sign of progress while requests run
    restarts: int = 0
    down_since_wall_s: float | None = None  # lost, or joined, at; None: it is up, or was never
    reason: str = ""  # why it was lost last, or is about to be
    retiring: bool = False  # it leaves for good, by the driver's wish
    handed_back: set[int] = field(default_factory=set)  # requests that it has given back (LEAVING)
    pending: "ObjectRef[Any] | None" = None  # answer of restart_engine, UpdateWeights or ReceiveWeights
    stream: ObjectRefGenerator | None = None
    inbox: deque[WorkerEvent] = field(default_factory=deque)  # taken from the stream, not handled yet

    sends: "set[ObjectRef[Any]]" = field(default_factory=set)  # commands whose failure must not go unseen

    def enter(self, state: SeatState, *, now_s: float, wall_s: float, timeout_s: float = 0.0) -> None:
        self.state = state
        self.since_wall_s = wall_s
        self.progress_s = now_s
        self.deadline_s = now_s + timeout_s

    def start_engine(self) -> None:
        self.forget()
        self._expect(self.handle.restart_engine.remote())

    def open_stream(self) -> None:
        self.stream = cast(ObjectRefGenerator, self.handle.stream.remote())
        self.awaited[self.stream] = self

    def load(self, weights: Weights) -> None:
        self._expect(self.ask(UpdateWeights(weights.manifest), weights.ref))

    def receive(self, offer: Offer) -> None:
        self._expect(self.ask(ReceiveWeights(offer)))

    def close(self) -> None:
        """Have the engine closed, and whoever the worker speaks to told."""
        self.forget()
        self._expect(self.handle.shutdown.remote())

    def give(self, command: Command) -> None:
        """A command that must arrive: that it did not is seen by `take_send`."""
        answer = self.tell(command)
        self.sends.add(answer)
        self.awaited[answer] = self

    def tell(self, command: Command, memory: "ObjectRef[Any] | None" = None) -> "ObjectRef[Any]":
        """See RolloutWorker.tell."""
        return cast("ObjectRef[Any]", cast(Any, self.handle).tell.remote(command, memory))

    def ask(self, command: Answered[A], memory: "ObjectRef[Any] | None" = None) -> "ObjectRef[A]":
        """See RolloutWorker.ask."""
        return cast("ObjectRef[A]", cast(Any, self.handle).ask.remote(command, memory))

    def _expect(self, answer: "ObjectRef[Any]") -> None:
        self.forget_answer()
        self.pending = answer
        self.awaited[answer] = self

    def forget_answer(self) -> None:
        """Whatever `pending` says is of no interest any more."""
        if self.pending is not None:
            del self.awaited[self.pending]
            self.pending = None

    def forget(self) -> None:
        """Nothing is awaited of the worker any more."""
        self.forget_answer()
        if self.stream is not None:
            del self.awaited[self.stream]
            self.stream = None
        for answer in self.sends:
            del self.awaited[answer]
        self.sends.clear()
        self.inbox.clear()

    def take_answer(self) -> SupervisorStatus | WeightsLoaded:
        """The answer of `pending`, which is ready. Raises what the worker raised, or RayError."""
        assert self.pending is not None
        ref = self.pending
        self.forget_answer()
        return cast(SupervisorStatus | WeightsLoaded, ray.get(ref, timeout=FETCH_TIMEOUT_S))

    def take_events(self) -> list[WorkerEvent] | None:
        """The next events of the stream, which is ready; None: it ended."""
        assert self.stream is not None
        try:
            ref = next(self.stream)
        except StopIteration:
            del self.awaited[self.stream]
            self.stream = None
            return None
        return cast(list[WorkerEvent], ray.get(ref, timeout=FETCH_TIMEOUT_S))

    def take_send(self, ref: Waitable) -> None:
        """Check a command that has been taken. Raises as `take_answer`."""
        answer = cast("ObjectRef[Any]", ref)
        self.sends.discard(answer)
        del self.awaited[answer]
        ray.get(answer, timeout=FETCH_TIMEOUT_S)

    def kill(self) -> None:
        """End the actor process, which takes its engine with it. Never raises, never waits."""
        self.forget()
        ray.kill(cast("ActorHandle[RolloutWorker]", self.handle), no_restart=True)


def put_to_sleep(seats: Iterable[Seat], timeout_s: float) -> dict[str, str]:
    """Ask all that are ready at once; by name, why one does not sleep after so long. One that is lost says nothing."""
    asked = {seat.ask(Sleep()): seat.name for seat in seats if seat.state is SeatState.READY}
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    awake = {asked[answer]: f"no answer in {timeout_s:g} s" for answer in late}
    for answer in ready:
        with suppress(RayError):
            if refusal := ray.get(answer, timeout=FETCH_TIMEOUT_S).refusal:
                awake[asked[answer]] = refusal
    return awake


def reason_of(error: RayError) -> str:
    """One line for people: the worker's own exception, or what Ray says first."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    first = str(cause).strip().splitlines()
    if isinstance(cause, EngineStartError) and first:
        return first[0]  # the engine's own reason: whoever asked for the start says that it failed
    preempted = " (its node was preempted)" if getattr(error, "preempted", False) else ""
    return f"{type(cause).__name__}: {first[0] if first else 'no message'}{preempted}"
