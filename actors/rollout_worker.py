"""The supervisor of one rollout engine: a Ray actor without a torch loop or a CUDA context.

Owns one engine (a process of its own, made by an injected factory) and the way of its events to the driver. It never
decides what is sampled where, keeps no requests (the driver does), and never restarts its engine unasked.

A reader thread polls the engine and hands what comes to the actor's event loop; engine calls go through one other
thread, in order. So the event loop is always free, and control calls are answered in milliseconds while the engine
decodes. `stream()` yields events the moment they come; what it has yielded is owned by the driver, not by this actor.

    factory = partial(spawn_engine, model_options, engine_options, seed=0, name="rollout-0")
    worker = ray.remote(RolloutWorker).options(num_cpus=1).remote("rollout-0", factory)
    status = ray.get(worker.restart_engine.remote())             # also the first start
    events = worker.stream.remote()                              # ObjectRefGenerator of list[Event]; one per engine
    loaded = ray.get(worker.update_weights.remote(manifest, ref))  # ref: uint8 array in the object store, zero-copy
    worker.submit.remote(requests)
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray

from actors.engine.types import (
    Capabilities,
    DrafterLoaded,
    DraftersSaved,
    EngineDiedError,
    EngineFailed,
    EngineIdle,
    EngineWindow,
    Event,
    Recorded,
    Request,
    RolloutEngine,
    WeightsLoaded,
)
from actors.identity import log_to
from actors.shared_rollouts import SharedRollouts
from actors.spot_host import SpotEvent, SpotHost, SpotPlan
from actors.termination import on_sigterm
from models.manifest import WeightsManifest

EngineFactory = Callable[[], RolloutEngine]
T = TypeVar("T")

_log = logging.getLogger(__name__)
_POLL_S = 0.05
_CLOSE_S = 10.0
_LEAVE_S = 10.0  # for the driver to take its requests back; then the process ends


class NoEngineError(RuntimeError):
    """A call that needs an engine reached a worker whose engine is not up."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker was told to end. Until the driver replaces it, it goes on: aborted requests give their tokens back."""

    reason: str


WorkerEvent = Event | SpotEvent | Leaving


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorStatus:
    """What a worker says about itself; everything as of the last event from its engine."""

    name: str
    engine: str  # "none" | "starting" | "running" | "failed"
    running: int  # requests in the engine's batch
    waiting: int  # requests in the engine's queue
    weights_version: int | None  # None: what the engine loaded at start
    weights_checksum: int | None
    restarts: int  # engines started after the first
    pid: int
    node_ip: str
    capabilities: Capabilities | None
    reason: str = ""  # why the engine failed
    torch_loaded: bool = False  # stays False: the supervisor has no torch


class _Incarnation:
    """One engine from start to end, with its reader thread. Events end with None."""

    def __init__(
        self, engine: RolloutEngine, loop: asyncio.AbstractEventLoop, name: str, spot: SpotHost | None
    ) -> None:
        self.engine = engine
        self.events: asyncio.Queue[WorkerEvent | None] = asyncio.Queue()
        self.awaited: dict[
            tuple[type, int | str], asyncio.Future[Any]
        ] = {}  # answers, by kind and version or directory
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: the actor is going away
            self._loop.call_soon_threadsafe(self._deliver, events)

    def announce(self, event: WorkerEvent) -> bool:
        """Say something of the worker itself, from any thread; False if the event loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:
            return False
        return True

    def _deliver(self, events: Sequence[Event | None]) -> None:
        for event in events:
            match event:
                case WeightsLoaded(version=key) | DrafterLoaded(version=key) | DraftersSaved(directory=key):
                    waiter = self.awaited.pop((type(event), key), None)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(event)
                    continue
            if isinstance(event, Recorded):
                if self._spot is not None:
                    self._spot.recorded(event)
                continue
            if isinstance(event, EngineIdle) and self._spot is not None:
                self._spot.out_of_work()
            if isinstance(event, EngineWindow):
                self.window = event
            elif isinstance(event, EngineFailed) and self.failure is None:
                self.failure = event
                _log.error("the engine failed: %s", event.reason)
            if event is None or isinstance(event, EngineFailed):
                self._fail_waiters()
            self.events.put_nowait(event)

    def _fail_waiters(self) -> None:
        reason = self.failure.reason if self.failure else "the engine was closed"
        for waiter in self.awaited.values():
            if not waiter.done():
                waiter.set_exception(EngineDiedError(reason))
        self.awaited.clear()

    def close(self) -> None:
        """Blocking; the engine's own close has a deadline."""
        self._closing.set()
        self._reader.join(_CLOSE_S)
        self.engine.close()


class RolloutWorker:
    """See the module docstring. An actor by `ray.remote(RolloutWorker)`; all methods run on one event loop."""

    def __init__(self, name: str, factory: EngineFactory, spot: SpotPlan | None = None, log: str | None = None) -> None:
        """spot: how it trains the drafter when it has run out of work; None: it does not. log: see log_to."""
        log_to(log, name)
        self._name = name
        self._factory = factory
        self._spot_plan = spot
        self._spot: SpotHost | None = None
        self._current: _Incarnation | None = None
        self._engine_state = "none"
        self._reason = ""
        self._starts = 0
        self._loaded: WeightsLoaded | None = None
        self._changing = asyncio.Lock()
        self._calls = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-calls")
        if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:  # a process of its own
            on_sigterm(self._leave)

    def __repr__(self) -> str:
        return self._name

    @ray.method
    async def restart_engine(self) -> SupervisorStatus:
        """Start the engine, after closing the one before if there is one. Raises what the factory raises."""
        async with self._changing:
            await self._close_engine()
            if self._spot is not None:
                await self._spot.engine_lost()
            self._engine_state = "starting"
            self._loaded = None
            try:
                # A thread of its own: the thread for calls may hang in a call to the engine that is being replaced.
                engine = await asyncio.to_thread(self._factory)
            except BaseException as error:
                self._engine_state, self._reason = "failed", f"{type(error).__name__}: {error}"
                _log.error("the engine did not start: %s", self._reason)
                raise
            self._starts += 1
            _log.info("engine %d is up", self._starts)
            if self._spot is None and self._spot_plan is not None:
                self._spot = self._spot_host(self._spot_plan)
            self._current = _Incarnation(engine, asyncio.get_running_loop(), self._name, self._spot)
            self._engine_state, self._reason = "running", ""
            if self._spot is not None:
                self._spot.out_of_work()
        return self._status()

    @ray.method
    async def submit(self, requests: list[Request]) -> None:
        """Give requests to the engine. Their outcome comes through `stream`. Drafter training here stops first."""
        if self._spot is not None:
            await self._spot.begin_work(len(requests))
        await self._call(self._engine().engine.submit, requests)

    @ray.method
    async def abort(self, request_ids: list[int]) -> None:
        """Each running one ends with a Finished event, finish_reason ABORT; unknown ids are ignored."""
        await self._call(self._engine().engine.abort, request_ids)

    @ray.method
    async def update_weights(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> WeightsLoaded:
        """Answers when the engine holds the new weights, with the checksum of what it read. The deadline is the
        caller's.

        Pass an ObjectRef as `buffer`: it arrives as a read-only view of the object store. Raises EngineDiedError.
        """
        incarnation = self._engine()
        update = incarnation.engine.update_weights
        loaded = await self._answer(incarnation, WeightsLoaded, manifest.version, update, manifest, buffer)
        if self._current is incarnation:
            self._loaded = loaded
        _log.info("weights of version %d are loaded", loaded.version)
        if self._spot is not None:
            await self._spot.target_changed(manifest, buffer)
        return loaded

    @ray.method
    async def update_drafter(self, name: str, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> DrafterLoaded:
        """New weights of the drafter `name`, for the engine and for the trainer here. Answers when the engine has them;
        the deadline is the caller's. Pass an ObjectRef as `buffer`. Raises NoEngineError, EngineDiedError."""
        incarnation = self._engine()
        update = incarnation.engine.update_drafter
        loaded = await self._answer(incarnation, DrafterLoaded, manifest.version, update, name, manifest, buffer)
        if self._spot is not None:
            await self._spot.drafter_changed(manifest, buffer)
        return loaded

    @ray.method
    async def stop_training(self) -> None:
        """Answers when no drafter trainer of this worker is on its device. None begins until the weights change."""
        if self._spot is not None:
            await self._spot.stand_still()

    @ray.method
    async def remember(self, rollouts: SharedRollouts, own_index: int) -> None:
        """Show the drafters what other workers finished; this one is `own_index`. Never raises: drafters only save
        time. Pass an ObjectRef as `rollouts`: one object serves all workers."""
        await self._tell("remember", *rollouts.not_from(own_index))

    @ray.method
    async def load_drafters(self, directory: str) -> None:
        """Restore what `save_drafters` wrote, as far as it is there. Never raises."""
        await self._tell("load_drafters", directory)

    @ray.method
    async def save_drafters(self, directory: str) -> None:
        """Answers when everything that the drafters would lose with the engine is in `directory`. The deadline is the
        caller's. Raises NoEngineError, EngineDiedError, and RuntimeError where it could not be written."""
        incarnation = self._engine()
        save = incarnation.engine.save_drafters
        saved = await self._answer(incarnation, DraftersSaved, directory, save, directory)
        if saved.failure is not None:
            raise RuntimeError(saved.failure)

    @ray.method
    async def sleep(self) -> None:
        """Release the KV cache's memory. Raises ValueError while requests run."""
        await self._call(self._engine().engine.sleep)

    @ray.method
    async def wake(self) -> None:
        await self._call(self._engine().engine.wake)

    @ray.method
    async def status(self) -> SupervisorStatus:
        return self._status()

    @ray.method
    async def stream(self) -> AsyncGenerator[list[WorkerEvent], None]:
        """Events of the present engine until it ends, in order, as they come. Ends after an EngineFailed, or when the
        engine is restarted or shut down. One reader per engine: raises RuntimeError on the second."""
        incarnation = self._engine()
        if incarnation.streamed:
            raise RuntimeError(f"{self._name}: the events of this engine are already being read")
        incarnation.streamed = True
        open_ = True
        while open_:
            batch = [await incarnation.events.get()]
            while not incarnation.events.empty():
                batch.append(incarnation.events.get_nowait())
            open_ = batch[-1] is not None
            if events := [event for event in batch if event is not None]:
                yield events

    @ray.method
    async def shutdown(self) -> None:
        """Close the engine and the trainer; the actor itself stays and answers."""
        async with self._changing:
            spot, self._spot = self._spot, None
            if spot is not None:
                await spot.close()
            await self._close_engine()

    def _leave(self) -> None:
        """On a thread: a cloud, Ray or a person wants this process to end. The driver owns the requests, so it is told,
        and ends this process when it has them; without an engine, or a driver, nothing is waited for."""
        current = self._current
        if current is not None and current.announce(Leaving("it was told to end (SIGTERM)")):
            time.sleep(_LEAVE_S)
        os._exit(0)  # its children end with it

    def _spot_host(self, plan: SpotPlan) -> SpotHost:
        def emit(event: SpotEvent) -> None:
            if self._current is not None:
                self._current.events.put_nowait(event)

        async def pause() -> None:
            await self._call(self._engine().engine.sleep)

        async def resume() -> None:
            await self._call(self._engine().engine.wake)

        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return SpotHost(self._name, node, time.time_ns(), plan, pause=pause, resume=resume, emit=emit)

    def _engine(self) -> _Incarnation:
        if self._current is None:
            raise NoEngineError(f"{self._name} has no engine: {self._reason or self._engine_state}")
        return self._current

    async def _answer(
        self, incarnation: _Incarnation, answer: type[T], key: int | str, call: Callable[..., None], *args: object
    ) -> T:
        """Ask the engine by `call`, and wait for its answer, an event of that type and key. Raises EngineDiedError."""
        if incarnation.failure is not None:
            raise EngineDiedError(incarnation.failure.reason)
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        incarnation.awaited[answer, key] = waiter
        await self._call(call, *args)
        return await waiter

    async def _call(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._calls, function, *args)

    async def _tell(self, method: str, *args: object) -> None:
        try:
            await self._call(getattr(self._engine().engine, method), *args)
        except Exception as error:
            _log.warning("%s: %s was not done: %s", self._name, method, error)

    async def _close_engine(self) -> None:
        incarnation, self._current = self._current, None
        self._engine_state = "none"
        if incarnation is not None:
            self._calls.shutdown(wait=False, cancel_futures=True)
            self._calls = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-calls")
            await asyncio.to_thread(incarnation.close)

    def _status(self) -> SupervisorStatus:
        incarnation = self._current
        failure = incarnation.failure if incarnation else None
        window = incarnation.window if incarnation else None
        return SupervisorStatus(
            name=self._name,
            engine="failed" if failure else self._engine_state,
            running=window.running if window else 0,
            waiting=window.waiting if window else 0,
            weights_version=self._loaded.version if self._loaded else None,
            weights_checksum=self._loaded.checksum if self._loaded else None,
            restarts=max(self._starts - 1, 0),
            pid=os.getpid(),
            node_ip=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            capabilities=incarnation.engine.capabilities if incarnation else None,
            reason=failure.reason if failure else self._reason,
            torch_loaded="torch" in sys.modules,
        )
