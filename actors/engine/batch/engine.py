"""Base of engines that decode a batch in this process: executes commands, accepts requests, reports events.

Owns requests from submit to their last event, the events not yet returned and the version of the weights. A subclass
adds the model: weights, drafters, memory, and one step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.account import StepAccount
from actors.engine.batch.intake import EngineLimits, finished, take_in
from actors.engine.batch.plan import Ticket
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.speculation import Speculator
from actors.engine.batch.stops import RuleStops
from actors.engine.batch.telemetry import Occupancy
from actors.engine.shared_rollouts import unpack
from contracts.engine import (
    Abort,
    EngineCommand,
    Hear,
    LoadDrafters,
    ReceiveWeights,
    RecordStates,
    Remember,
    SaveDrafters,
    Sleep,
    Submit,
    UpdateDrafter,
    UpdateWeights,
    Wake,
)
from contracts.handoff import Offer
from contracts.rollout import (
    NOTHING_SAMPLED,
    DrafterLoaded,
    DraftersSaved,
    EngineAnswer,
    EngineIdle,
    Event,
    FinishReason,
    Rejected,
    Request,
    Slept,
    WeightsLoaded,
)
from models.manifest import WeightsManifest

Bytes = NDArray[np.uint8]
TokenLists = list[NDArray[np.int32]]


class TicketQueue(Protocol):
    """Waiting and running requests: the native scheduler, or the queue before vLLM's."""

    @property
    def has_work(self) -> bool: ...
    def __contains__(self, request_id: int) -> bool: ...
    def ticket(self, request_id: int) -> Ticket: ...
    def add(self, ticket: Ticket) -> None: ...
    def remove(self, request_id: int, *, finished: bool) -> None: ...


class BatchEngine(ABC):
    """EngineCore over a slot table.

    A new command needs a class in contracts.engine, a case in `apply`, and an abstract method here if engines implement
    it differently."""

    # set by the subclass at its start
    _table: SlotTable
    _limits: EngineLimits
    _queue: TicketQueue
    _occupancy: Occupancy
    _speculator: Speculator
    _stops: RuleStops
    _account: StepAccount

    def __init__(self, weights_version: int, clock: Callable[[], float]) -> None:
        self._version, self._clock = weights_version, clock
        self._events: list[Event] = []  # the same list always: parts append to it
        self._idle = True

    @property
    def has_work(self) -> bool:
        """Whether `step` has work to do or events to report."""
        return self._queue.has_work or bool(self._events) or not self._idle

    def apply(self, command: EngineCommand, memory: Bytes | None) -> EngineAnswer | None:
        """Execute a command and return its answer, if it has one. An exception ends the engine."""
        match command:
            case Submit(requests):
                self.submit(requests)
            case Abort(request_ids):
                self.abort(request_ids)
            case UpdateWeights(manifest):
                return self.update_weights(manifest, _given(memory))
            case ReceiveWeights(offer):
                return self.receive_weights(offer)
            case Sleep():
                try:
                    self.sleep()
                except ValueError as error:
                    return Slept(str(error))
                return Slept()
            case Wake():
                self.wake()
            case Remember(own_index):
                self.remember(*unpack(_given(memory), own_index))
            case Hear(texts):
                self._speculator.hear(texts, self._clock())
            case RecordStates(on):
                self.record(on)
            case SaveDrafters(directory):
                return DraftersSaved(directory, self.save_drafters(directory))
            case LoadDrafters(directory):
                self.load_drafters(directory)
            case UpdateDrafter(name, manifest):
                return self.update_drafter(name, manifest, _given(memory))
            case _:
                assert_never(command)
        return None

    # Requests.

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.request_id in self._queue:
                self._tell(Rejected(request.request_id, "a request with this id is running already"))
                continue
            taken = take_in(request, self._limits, self._version, self._clock())
            if not isinstance(taken, Ticket):
                self._tell(taken)
                continue
            self._accept(taken)
        self._idle = self._idle and not requests

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests now: each is Finished with reason ABORT and its tokens so far (none, if it never ran)."""
        now_s = self._clock()
        tickets = {known: self._queue.ticket(known) for known in request_ids if known in self._queue}
        for request_id, ticket in tickets.items():
            tokens = ticket.prefix or NOTHING_SAMPLED if ticket.slot < 0 else self._table.response(ticket.slot)
            version = self._version if ticket.weights_version < 0 else ticket.weights_version
            self._queue.remove(request_id, finished=False)
            self._tell(finished(ticket, tokens, FinishReason.ABORT, version, now_s))
            self._idle = False

    def _accept(self, ticket: Ticket) -> None:
        self._queue.add(ticket)

    def _ended(self, ticket: Ticket, slot: int, reason: FinishReason, now_s: float) -> None:
        """Report a request that drew its last token, and free the slot."""
        response, propensity = self._table.response(slot), self._stops.propensity(slot, reason)
        self._queue.remove(ticket.request.request_id, finished=True)
        self._tell(finished(ticket, response, reason, ticket.weights_version, now_s, propensity))

    # Weights and memory.

    @abstractmethod
    def update_weights(self, manifest: WeightsManifest, buffer: Bytes) -> WeightsLoaded:
        """Load new weights in place.

        Running requests continue with them on their present K/V; no other request reuses K/V of the old weights. Raises
        models.weights.WeightsCorruptError, models.checkpoint.WeightsMismatchError or models.peft.AdapterError, before
        any change.
        """

    @abstractmethod
    def receive_weights(self, offer: Offer) -> WeightsLoaded:
        """Same as `update_weights`, piece by piece from the learner. Does not raise for a failed transfer: the answer
        gives the reason."""

    def sleep(self) -> None:
        """Release the KV cache. Raises ValueError while there are requests."""
        if self._queue.has_work:
            raise ValueError("the engine has requests: wait for them or abort them before sleep")
        self._release()

    @abstractmethod
    def _release(self) -> None:
        """Release the KV cache. Called only without requests."""

    @abstractmethod
    def wake(self) -> None:
        """Allocate the KV cache's memory again."""

    @abstractmethod
    def close(self) -> None:
        """Release resources that would outlive this process. Idempotent."""

    # Drafters.

    def update_drafter(self, name: str, manifest: WeightsManifest, buffer: Bytes) -> DrafterLoaded:
        """Load new weights of a drafter in place. Never raises: a drafter that cannot load them keeps its own, and the
        answer gives the reason."""
        start_s = self._clock()
        reason = self._load_drafter(name, manifest, buffer)
        self._account.new_weights()
        return DrafterLoaded(name, manifest.version, manifest.checksum, self._clock() - start_s, reason)

    @abstractmethod
    def _load_drafter(self, name: str, manifest: WeightsManifest, buffer: Bytes) -> str:
        """Load a drafter's weights; return why it keeps its own, or ""."""

    def remember(self, prompts: TokenLists, responses: TokenLists) -> None:
        """Pass rollouts of other engines to the drafters: prompt and response tokens of each."""
        self._speculator.remember(prompts, responses)

    @abstractmethod
    def record(self, on: bool) -> None:
        """Record hidden states of requests that begin from now on, or stop."""

    def save_drafters(self, directory: str) -> str | None:
        """Save the drafter state that would be lost with this process. Returns the failure, if any; never raises."""
        return self._speculator.save(directory)

    def load_drafters(self, directory: str) -> None:
        """Restore what `save_drafters` wrote. State without a file stays unchanged."""
        self._speculator.load(directory)

    # A step.

    def step(self) -> list[Event]:
        """Run one forward of the running batch; return the events since the last call."""
        now_s = self._clock()
        self._account.begin()
        self._advance(now_s)
        events = list(self._events)
        self._events.clear()
        now_s = self._clock()
        idle = not self._queue.has_work
        window = self._account.window(now_s, self._occupancy, idle=idle)
        if window is not None:
            events.append(window)
            events += self._account.passes(window, idle=idle)
        if idle and not self._idle:
            events += self._before_idle()
            events.append(EngineIdle(now_s))
        self._idle = idle
        return events

    @abstractmethod
    def _advance(self, now_s: float) -> None:
        """Compute one step, if there is any work, and account for it."""

    def _before_idle(self) -> list[Event]:
        """Return events to report before the engine becomes idle."""
        return []

    def _tell(self, event: Event | None) -> None:
        if event is not None:
            self._events.append(event)


def _given(memory: Bytes | None) -> Bytes:
    if memory is None:
        raise ValueError("the command came without the memory that belongs to it")
    return memory
