"""One rollout worker as the driver sees it: its Ray handle, state, pending call and deadline.

Owns the state machine of one worker and its Ray calls; never decides about requests (ledger) or restarts (dispatcher).

    STARTING --engine is up, no weights to send--> READY --set_weights--> LOADING --answer--> READY
    STARTING --engine is up, weights to send--> LOADING (nothing pending until a hand-over ends)
    any --it must end, or leave--> LEAVING --its requests are back, or the deadline--> lost | CLOSING
    any --lost--> STARTING (restarts left) | DEAD
    CLOSING --its engine is closed, or the deadline--> gone
"""

import logging
import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayError, RayTaskError

from actors.engine.process import EngineStartError
from actors.incarnation import StreamEnds, WorkerEvent
from actors.loop import EventLoop, Waitable
from actors.rollout_worker import RolloutWorker, SupervisorStatus
from contracts.engine import Answered, Command, ReceiveWeights, UpdateWeights
from contracts.handoff import Offer
from contracts.rollout import WeightsLoaded
from launch.dispatch.spans import WorkerSpans
from models.manifest import WeightsManifest

A = TypeVar("A")
WorkerHandle = ActorProxy[RolloutWorker]

_log = logging.getLogger(__name__)
FETCH_TIMEOUT_S = 60.0  # to bring one existing object to this node
# Lists of events of one stream. While a stream lasts, Ray keeps the id of every object of it in the driver, read or not
# (ObjectRefStream::refs_written_to_stream_ of Ray 2.60), so the driver grew as long as its workers lived.
STREAM_LISTS = 1000


def worker_name(index: int) -> str:
    """Return the name of an initial worker in events, logs and the coordinator."""
    return f"rollout-{index}"


class WorkerStarts(Protocol):
    """What makes the dispatcher's workers, by name."""

    def spawn(self, name: str) -> WorkerHandle:
        """Start the worker's actor. Never waits."""

    def placed(self, name: str) -> bool:
        """Whether the worker's place is there. A worker that waits for it uses up no restart while others are up."""


class SeatState(StrEnum):
    STARTING = "starting"
    LOADING = "loading weights"
    READY = "ready"
    LEAVING = "leaving"
    CLOSING = "closing"
    DEAD = "dead"


class WorkerNow(NamedTuple):
    """A worker at one moment, for code that decides how many there are."""

    state: SeatState
    running: int  # requests
    node_id: str  # "": not known yet
    retiring: bool  # it leaves for good


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that every worker must hold. `ref` points to the uint8 buffer."""

    manifest: WeightsManifest
    ref: "ObjectRef[Any]"
    deltas: "Deltas | None" = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed between two published versions. `ref` points to it (models.delta)."""

    base_version: int
    version: int
    ref: "ObjectRef[Any]"
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Deltas:
    """How workers update by delta: they keep what they load, and next time get only what changed. `home`: node whose
    workers keep nothing, since they map the whole buffer there; "": all keep it. `chain`: consecutive deltas up to
    these weights; without any, workers load them whole."""

    home: str
    chain: tuple[Delta, ...] = ()

    def since(self, version: int | None) -> tuple[Delta, ...]:
        """Return the deltas from that version to these weights; none if the chain does not reach back to it."""
        found = (index for index, delta in enumerate(self.chain) if delta.base_version == version)
        index = next(found, None)
        return () if index is None else self.chain[index:]


@dataclass(slots=True, eq=False, kw_only=True)
class Seat:
    """The driver's record of one worker. Times are of the dispatcher's monotonic clock; `*_wall_s` are time.time()."""

    name: str
    handle: WorkerHandle
    spans: WorkerSpans
    loop: EventLoop
    state: SeatState = SeatState.STARTING
    deadline_s: float = 0.0  # of what is pending (STARTING, LOADING, LEAVING, CLOSING)
    since_wall_s: float = 0.0  # when the state was entered
    progress_s: float = 0.0  # last sign of progress while requests run
    losses: int = 0
    restarts: int = 0  # after losses that may be its own fault ...
    blamed: bool = False  # ... as the last one was
    down_since_wall_s: float | None = None  # when it was lost or joined; None: it is up, or never was
    reason: str = ""  # why it was lost last, or will be
    node_id: str = ""  # where its engine is; "": it is not up
    retiring: bool = False  # it leaves for good, at the driver's request
    held_version: int | None = None  # version of the buffer that its worker keeps, or will; None: none is known
    handed_back: set[int] = field(default_factory=set)  # requests that it has returned (LEAVING)
    pending: "ObjectRef[Any] | None" = None  # answer of restart_engine, UpdateWeights or ReceiveWeights
    stream: ObjectRefGenerator | None = None
    inbox: deque[WorkerEvent] = field(default_factory=deque)  # taken from the stream, not handled yet

    sends: "set[ObjectRef[Any]]" = field(default_factory=set)  # commands whose failure must be noticed

    @property
    def waits_for_weights(self) -> bool:
        """Whether it is up and there are no weights to load yet."""
        return self.state is SeatState.LOADING and self.pending is None

    def enter(self, state: SeatState, *, now_s: float, wall_s: float, timeout_s: float = 0.0) -> None:
        self.state = state
        self.since_wall_s = wall_s
        self.progress_s = now_s
        self.deadline_s = now_s + timeout_s

    def start_engine(self) -> None:
        self.forget()
        self.node_id = ""
        self.held_version = None  # until it says so
        self._expect(self.handle.restart_engine.remote())

    def open_stream(self) -> None:
        self.stream = cast(ObjectRefGenerator, self.handle.stream.remote(STREAM_LISTS))
        self._await(self.stream)

    def load(self, weights: Weights, base: Weights | None = None) -> None:
        """`base`: earlier weights, whose buffer is on its node. A worker that holds none gets the deltas since these if
        they are fewer bytes than the whole."""
        deltas, held = weights.deltas, self.held_version
        self.held_version = None
        if deltas is None or (deltas.home and deltas.home == self.node_id):
            self._expect(self.ask(UpdateWeights(weights.manifest), weights.ref))
            return
        bases = [(base.manifest, base.ref)] if held is None and base is not None else []
        chain = deltas.since(bases[0][0].version if bases else held)
        if sum(delta.total_bytes for delta in chain) >= weights.manifest.total_bytes:
            chain = ()
        refs, bases = [delta.ref for delta in chain], bases if chain else []
        self._expect(self.handle.update_weights.remote(weights.manifest, [weights.ref], refs, bases))
        self.held_version = weights.manifest.version

    def receive(self, offer: Offer) -> None:
        self._expect(self.ask(ReceiveWeights(offer)))

    def close(self) -> None:
        """Have the worker close its engine and notify its peers."""
        self.forget()
        self._expect(self.handle.shutdown.remote())

    def give(self, command: Command) -> None:
        """Send a command that must arrive; `take_send` checks it."""
        # Pickled here: Ray's pickler calls Python for every object, which takes as long again as the whole call.
        answer = cast("ObjectRef[Any]", cast(Any, self.handle).tell.remote(pickle.dumps(command)))
        self.sends.add(answer)
        self._await(answer)

    def tell(self, command: Command | bytes, memory: "ObjectRef[Any] | None" = None) -> "ObjectRef[Any]":
        """See RolloutWorker.tell."""
        return cast("ObjectRef[Any]", cast(Any, self.handle).tell.remote(command, memory))

    def ask(self, command: Answered[A], memory: "ObjectRef[Any] | None" = None) -> "ObjectRef[A]":
        """See RolloutWorker.ask."""
        return cast("ObjectRef[A]", cast(Any, self.handle).ask.remote(command, memory))

    def _expect(self, answer: "ObjectRef[Any]") -> None:
        self.forget_answer()
        self.pending = answer
        self._await(answer)

    def _await(self, waitable: Waitable) -> None:
        self.loop.expect(waitable, partial(WorkerArrived, self, waitable))

    def forget_answer(self) -> None:
        """Ignore the answer of `pending`."""
        if self.pending is not None:
            self.loop.forget(self.pending)
            self.pending = None

    def forget(self) -> None:
        """Ignore all that is pending for the worker."""
        self.forget_answer()
        if self.stream is not None:
            self.loop.forget(self.stream)
            self.stream = None
        for answer in self.sends:
            self.loop.forget(answer)
        self.sends.clear()
        self.inbox.clear()

    def take_answer(self, value: Any) -> SupervisorStatus | WeightsLoaded:
        """Return what arrived for `pending`. Raises what the worker raised, or RayError."""
        self.pending = None
        return cast(SupervisorStatus | WeightsLoaded, _good(value))

    def take_events(self, value: Any) -> list[WorkerEvent] | None:
        """Return what arrived on the stream; None if it has ended. Raises as `take_answer`."""
        assert self.stream is not None
        try:
            ref = next(self.stream)  # already there: this does not wait
        except StopIteration:
            self.stream = None
            return None
        if isinstance(value, Exception):  # the end, or what ended it
            ray.get(ref, timeout=FETCH_TIMEOUT_S)
        events: list[WorkerEvent | StreamEnds] = _good(value)
        if events and isinstance(events[-1], StreamEnds):
            events.pop()
            self.open_stream()  # the old one has no further object
        else:
            self._await(self.stream)
        return cast(list[WorkerEvent], events)

    def take_send(self, ref: Waitable, value: Any) -> None:
        """Check a command that has been taken. Raises as `take_answer`."""
        self.sends.discard(cast("ObjectRef[Any]", ref))
        _good(value)

    def kill(self) -> None:
        """End the actor process, which takes its engine with it. Never raises, never waits."""
        self.forget()
        ray.kill(cast("ActorHandle[RolloutWorker]", self.handle), no_restart=True)


def _good(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


@dataclass(frozen=True, slots=True)
class WorkerArrived:
    """A value that Ray brings for something awaited from a worker, or an exception in its place."""

    seat: Seat
    waitable: Waitable
    value: Any


def some_are(seats: list[Seat], holds: Callable[[Seat], bool]) -> bool:
    """Whether `holds` is true for one of the seats. Removes seats from the list's end for which it is false, since they
    cannot become true again. So repeated calls cost, in total, one look at each."""
    while seats and not holds(seats[-1]):
        seats.pop()
    return bool(seats)


def node_lost(error: RayError | None, node_id: str) -> bool:
    """Whether a worker was lost because its node was, so without its own fault. `node_id`: its node, if known."""
    if getattr(error, "preempted", False) or "its node has died" in str(error):
        return True
    try:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    except Exception:  # Ray raises any exception while its head restarts; the loss is handled anyway
        _log.warning("the cluster's nodes could not be listed", exc_info=True)
        return False
    return bool(node_id) and node_id not in alive


def reason_of(error: RayError) -> str:
    """Return one line for people: the worker's own exception, or the first line of Ray's message."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    first = str(cause).strip().splitlines()
    if isinstance(cause, EngineStartError) and first:
        return first[0]  # the engine's own reason; the caller of the start reports the failure
    preempted = " (its node was preempted)" if getattr(error, "preempted", False) else ""
    return f"{type(cause).__name__}: {first[0] if first else 'no message'}{preempted}"
