"""One engine of a rollout worker, from its start to its end: its reader thread, and its events for the driver.

The thread polls the engine and posts events to the actor's event loop. They go out at once, except those that can wait
a little (`PATIENT`): a driver of 1,024 workers cannot take a batch for every engine step of each.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from actors.engine.process import RolloutEngine
from actors.spot_host import SpotEvent, SpotHost
from contracts.rollout import (
    DrafterFailed,
    DriverEvent,
    EngineAnswer,
    EngineDiedError,
    EngineFailed,
    EngineIdle,
    EngineWindow,
    Event,
    Finished,
    GraphsFailed,
    PassEvent,
    Progress,
    Recorded,
    Rejected,
)

_log = logging.getLogger(__name__)
_POLL_S = 0.05
_CLOSE_S = 10.0
_HOLD_S = 0.25  # longest wait of PATIENT events for others


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker received SIGTERM. It continues until the driver replaces it: aborted requests return their tokens."""

    reason: str


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """The last event of a stream, though its engine goes on: the driver opens the next one."""


WorkerEvent = DriverEvent | SpotEvent | Leaving
PATIENT = (Progress, EngineWindow, PassEvent)  # not urgent; a prefix is lost only with the worker


class Incarnation:
    """One engine from start to end, with its reader thread. Events end with None."""

    def __init__(
        self, engine: RolloutEngine, loop: asyncio.AbstractEventLoop, name: str, spot: SpotHost | None
    ) -> None:
        self.engine = engine
        self._events: asyncio.Queue[WorkerEvent | None] = asyncio.Queue()
        self._pressing = asyncio.Event()  # set if an event is not PATIENT
        self.asked: deque[asyncio.Future[Any]] = deque()  # the engine answers in this order
        self.failure: EngineFailed | None = None
        self.window: EngineWindow | None = None
        self.streamed = False
        self._spot = spot
        self._loop = loop
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        failure: EngineFailed | None = None
        while failure is None and not self._closing.is_set():
            try:
                events: list[Event] = self.engine.poll(_POLL_S)
            except EngineDiedError as error:
                events = [EngineFailed(str(error))]
            except Exception as error:
                events = [EngineFailed(f"reading from the engine: {type(error).__name__}: {error}")]
            failure = next((e for e in events if isinstance(e, EngineFailed)), None)
            if events:
                self._post(events)
        self._post([None])

    def _post(self, events: Sequence[Event | None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the actor is ending
            self._loop.call_soon_threadsafe(self._deliver, events)

    def announce(self, event: WorkerEvent) -> bool:
        """Queue an event of the worker itself, from any thread; return False if the event loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self.say, event)
        except RuntimeError:
            return False
        return True

    def _deliver(self, events: Sequence[Event | None]) -> None:
        for event in events:
            match event:
                case EngineAnswer():
                    waiter = self.asked.popleft()
                    if not waiter.done():  # otherwise the caller has gone
                        waiter.set_result(event)
                    continue
                case Recorded():
                    if self._spot is not None:
                        self._spot.recorded(event)
                    continue
                case EngineIdle():
                    if self._spot is not None:
                        self._spot.out_of_work()
                    continue
                case EngineWindow():
                    self.window = event
                case EngineFailed():
                    self.failure = self.failure or event
                    _log.error("the engine failed: %s", event.reason)
                    self._nobody_answers()
                case None:
                    self._nobody_answers()
                case Finished() | Progress() | Rejected() | DrafterFailed() | GraphsFailed() | PassEvent():
                    pass
                case _:
                    assert_never(event)
            self.say(event)

    def say(self, event: WorkerEvent | None) -> None:
        """Queue an event for the stream's reader. Call it on the event loop."""
        self._events.put_nowait(event)
        if not isinstance(event, PATIENT):
            self._pressing.set()

    async def next_events(self) -> list[WorkerEvent | None]:
        """Return all queued events, once one is not PATIENT or the first has waited for _HOLD_S."""
        batch = [await self._events.get()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._pressing.wait(), _HOLD_S)
        while not self._events.empty():
            batch.append(self._events.get_nowait())
        self._pressing.clear()
        return batch

    def _nobody_answers(self) -> None:
        reason = self.failure.reason if self.failure else "the engine was closed"
        while self.asked:
            waiter = self.asked.popleft()
            if not waiter.done():
                waiter.set_exception(EngineDiedError(reason))

    def close(self) -> None:
        """Close the engine. Blocks; the engine's own close has a deadline."""
        self._closing.set()
        self._reader.join(_CLOSE_S)
        self.engine.close()
