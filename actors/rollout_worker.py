"""Supervisor of one rollout engine: a Ray actor without a torch loop or a CUDA context.

Owns one engine (a separate process, made by an injected factory) and forwards its events to the driver. The driver
assigns and stores requests. The engine is restarted only on command.

A reader thread polls the engine (actors.incarnation); engine calls run on one other thread, in order. So the event loop
is always free, and control calls are answered in milliseconds while the engine decodes. The driver, not this actor,
owns the objects that `stream()` yields.

    factory = partial(spawn_engine, model_options, engine_options, seed=0, name="rollout-0")
    worker = ray.remote(RolloutWorker).options(num_cpus=1).remote("rollout-0", factory)
    status = ray.get(worker.restart_engine.remote())             # also the first start
    events = worker.stream.remote()                              # of list[WorkerEvent]; one reader per engine
    loaded = ray.get(worker.ask.remote(UpdateWeights(manifest), ref))  # ref: uint8 array in the object store, zero-copy
    worker.tell.remote(Submit(tuple(requests)))
"""

import asyncio
import contextlib
import logging
import os
import pickle
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from actors.engine.process import RolloutEngine
from actors.group_engine import group_gpus
from actors.handoff.base import BaseWeights
from actors.identity import log_to
from actors.incarnation import Incarnation, Leaving, StreamEnds, WorkerEvent
from actors.spot_host import SpotEvent, SpotHost, SpotPlan
from actors.termination import on_sigterm
from contracts.engine import Answered, Command, Sleep, Submit, UpdateDrafter, UpdateWeights, Wake
from contracts.rollout import (
    EngineDiedError,
    Slept,
    WeightsLoaded,
)
from models.delta import DeltaError
from models.manifest import WeightsManifest

EngineFactory = Callable[..., RolloutEngine]  # called with `gpus` if it uses others than Ray shows
A = TypeVar("A")
Memory = NDArray[np.uint8]

_log = logging.getLogger(__name__)
_LEAVE_S = 10.0  # for the driver to take back its requests; then the process ends


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorStatus:
    """A worker's status, as of the last event from its engine."""

    name: str
    engine: str  # "none" | "starting" | "running" | "failed"
    running: int  # requests in the engine's batch
    waiting: int  # requests in the engine's queue
    weights_version: int | None  # None: the weights that the engine loaded at its start
    weights_checksum: int | None
    restarts: int  # engines started after the first
    pid: int
    node_ip: str
    node_id: str = ""  # Ray's node id: several nodes may share an address
    reason: str = ""  # why the engine failed
    base_version: int | None = None  # of the weights that the worker keeps, which outlive its engine
    torch_loaded: bool = False  # stays False: the supervisor has no torch


class RolloutWorker:
    """See the module docstring. An actor by `ray.remote(RolloutWorker)`; all methods run on one event loop."""

    def __init__(
        self,
        name: str,
        factory: EngineFactory,
        spot: SpotPlan | None = None,
        log: str | None = None,
        gpus_timeout_s: float | None = None,
    ) -> None:
        """spot: plan for drafter training without work; None: no training. log: see log_to. gpus_timeout_s: see
        Placement."""
        log_to(log, name)
        self._name = name
        self._factory, self._gpus_timeout_s = factory, gpus_timeout_s
        self._spot_plan = spot
        self._spot: SpotHost | None = None
        self._current: Incarnation | None = None
        self._engine_state = "none"
        self._reason = ""
        self._starts = 0
        self._loaded: WeightsLoaded | None = None
        self._base, self._basing = BaseWeights(), asyncio.Lock()
        self._asleep = False  # on the driver's command; the spot trainer pauses separately
        self._changing = asyncio.Lock()
        self._telling = asyncio.Lock()  # first come, first served
        self._calls = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-calls")
        if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:  # its own process
            on_sigterm(self._leave)

    def __repr__(self) -> str:
        return self._name

    @ray.method
    async def restart_engine(self) -> SupervisorStatus:
        """Start the engine, after closing the previous one. Raises the factory's errors."""
        async with self._changing:
            await self._close_engine()
            if self._spot is not None:
                await self._spot.engine_lost()
            self._engine_state = "starting"
            self._loaded, self._asleep = None, False
            try:
                # A separate thread: the call thread may hang in the engine that is being replaced.
                engine = await asyncio.to_thread(self._make_engine)
            except BaseException as error:
                self._engine_state, self._reason = "failed", f"{type(error).__name__}: {error}"
                _log.error("the engine did not start: %s", self._reason)
                raise
            self._starts += 1
            _log.info("engine %d is up", self._starts)
            if self._spot is None and self._spot_plan is not None:
                self._spot = self._spot_host(self._spot_plan)
            self._current = Incarnation(engine, asyncio.get_running_loop(), self._name, self._spot)
            self._engine_state, self._reason = "running", ""
            if self._spot is not None:
                self._spot.out_of_work()
        return self._status()

    @ray.method
    async def tell(self, command: Command | bytes, memory: Memory | None = None) -> None:
        """Send the engine a command without an answer, possibly pickled. `stream` yields the outcome of requests.

        Pass an ObjectRef as `memory`: it arrives as a read-only view of the object store. Drafter training here stops
        before requests are sent. Commands keep their order, even if some wait: an abort never overtakes its requests.
        Raises EngineDiedError."""
        if isinstance(command, bytes):
            command = cast(Command, pickle.loads(command))
        if isinstance(command, Answered):
            raise TypeError(f"{type(command).__name__} is answered: ask it")
        async with self._telling:
            if isinstance(command, Submit) and self._spot is not None:
                await self._spot.begin_work(len(command.requests))
            if isinstance(command, Submit) and self._asleep:
                self._asleep = False
                await self._send(self._engine().engine, Wake())
            await self._send(self._engine().engine, command, memory)

    @ray.method
    async def ask(self, command: Answered[Any], memory: Memory | None = None) -> Any:
        """Send the engine a command and return its answer; the caller sets the deadline. `memory`: as in `tell`.

        New weights also go to the trainer here, once the engine has them. Raises EngineDiedError."""
        incarnation = self._engine()
        answer = await self._ask(incarnation, command, memory)
        if isinstance(answer, WeightsLoaded):
            if answer.failure:
                _log.warning("weights that were offered did not come: %s", answer.failure)
            else:
                _log.info("weights of version %d are loaded (%s)", answer.version, answer.way)
                if self._current is incarnation:
                    self._loaded = answer
        if isinstance(answer, Slept) and not answer.refusal:
            self._asleep = True  # until requests arrive
        if isinstance(command, UpdateWeights) and not self._base.holds(command.manifest):
            self._base.forget()  # nothing will be built on it
        if self._spot is not None and memory is not None:
            if isinstance(command, UpdateWeights):
                await self._spot.target_changed(command.manifest, memory)
            elif isinstance(command, UpdateDrafter):
                await self._spot.drafter_changed(command.manifest, memory)
        return answer

    @ray.method
    async def update_weights(
        self,
        manifest: WeightsManifest,
        whole: "Sequence[ray.ObjectRef[Memory]]",
        deltas: "Sequence[ray.ObjectRef[Any]]",
        base: "Sequence[tuple[WeightsManifest, ray.ObjectRef[Memory]]]" = (),
    ) -> WeightsLoaded:
        """Same as `ask(UpdateWeights(manifest), memory)`, but keep a copy of the buffer in this worker for the next
        delta.

        `deltas`: references to the deltas that lead from the held weights to these, in order. `base`: at most one
        earlier buffer, from which they lead if this worker holds none. `whole`: one reference to the buffer, fetched
        only if it is not held already, and the deltas are missing or do not apply; the answer's `instead` then says
        why. All are in sequences, so that Ray fetches none in advance. Raises as `ask`, and RayError."""
        memory, instead = None, ""
        async with self._basing:
            try:
                if base and self._base.version is None:
                    self._base.keep(base[0][0], await base[0][1])
                if deltas or self._base.holds(manifest):
                    memory = await asyncio.to_thread(self._base.change, manifest, [await each for each in deltas])
            except (DeltaError, RayError) as error:
                instead = next(iter(str(error).strip().splitlines()), type(error).__name__)
            way = "store" if memory is None else "delta"
            if memory is None:
                self._base.forget()  # free it before the next one arrives
                memory = await whole[0]
                self._base.keep(manifest, memory)
        answer: WeightsLoaded = await self.ask(UpdateWeights(manifest), memory)
        return replace(answer, way=way, instead=instead)

    @ray.method
    async def target_weights(self, manifest: WeightsManifest, memory: Memory) -> None:
        """Give the trainer here the weights that the engine received piece by piece."""
        if self._spot is not None:
            await self._spot.target_changed(manifest, memory)

    @ray.method
    async def use_buffer(self, buffer: Any) -> None:
        """Set the handle of this node's DataBufferActor. Call it before the first request."""
        if self._spot is not None:
            self._spot.use_buffer(buffer)

    @ray.method(num_returns=2)
    async def drafter_weights(self, version: int) -> tuple[WeightsManifest, Memory]:
        """Return a version of the drafter weights published by the trainer here: manifest and bytes.

        These are two objects that belong to the caller and outlive this worker. Raises KeyError if newer versions
        replaced it."""
        if self._spot is None:
            raise KeyError(version)
        return self._spot.published(version)

    @ray.method
    async def start_trainer(self) -> None:
        """Start the drafter trainer of this worker, which then trains as the coordinator says. Does not wait for it."""
        if self._spot is not None:
            self._spot.start_trainer()

    @ray.method
    async def stop_training(self) -> None:
        """Return once no drafter trainer of this worker uses its device. None starts until the weights change."""
        if self._spot is not None:
            await self._spot.stand_still()

    @ray.method
    async def status(self) -> SupervisorStatus:
        return self._status()

    @ray.method
    async def stream(self, most: int | None = None) -> AsyncGenerator[list[WorkerEvent | StreamEnds], None]:
        """Yield the present engine's events in order until it ends. `most`: yield at most so many lists, the last of
        which ends with StreamEnds. Another call goes on from there.

        Ends after an EngineFailed, or when the engine is restarted or shut down. One reader per engine: raises
        RuntimeError on the second."""
        incarnation = self._engine()
        if incarnation.streamed:
            raise RuntimeError(f"{self._name}: the events of this engine are already being read")
        incarnation.streamed = True
        open_, yielded = True, 0
        while open_:
            batch = await incarnation.next_events()
            open_ = batch[-1] is not None
            events: list[WorkerEvent | StreamEnds] = [event for event in batch if event is not None]
            if not events:
                continue
            yielded += 1
            if open_ and yielded == most:
                incarnation.streamed = open_ = False
                events.append(StreamEnds())
            yield events

    @ray.method
    async def shutdown(self) -> None:
        """Close the engine and the trainer; the actor itself keeps running."""
        async with self._changing:
            spot, self._spot = self._spot, None
            if spot is not None:
                await spot.close()
            await self._close_engine()

    def _leave(self) -> None:
        """Handle SIGTERM, on a thread. The driver owns the requests: it receives Leaving, and ends this process once it
        has them. Without an engine or a driver, exit at once."""
        current = self._current
        if current is not None and current.announce(Leaving("it received SIGTERM")):
            time.sleep(_LEAVE_S)
        os._exit(0)  # its children end with it

    def _spot_host(self, plan: SpotPlan) -> SpotHost:
        def emit(event: SpotEvent) -> None:
            if self._current is not None:
                self._current.say(event)

        async def pause() -> None:
            if refusal := (await self._ask(self._engine(), Sleep())).refusal:
                raise ValueError(refusal)

        async def resume() -> None:
            await self._send(self._engine().engine, Wake())

        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return SpotHost(self._name, node, time.time_ns(), plan, pause=pause, resume=resume, emit=emit)

    def _engine(self) -> Incarnation:
        if self._current is None:
            raise EngineDiedError(f"{self._name} has no engine: {self._reason or self._engine_state}")
        return self._current

    async def _ask(self, incarnation: Incarnation, command: Answered[A], memory: Memory | None = None) -> A:
        if incarnation.failure is not None:
            raise EngineDiedError(incarnation.failure.reason)
        waiter: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        incarnation.asked.append(waiter)  # in the sending order of the call thread
        try:
            # Shielded: a submitted command is sent and answered even if its caller goes away.
            await asyncio.shield(self._send(incarnation.engine, command, memory))
        except Exception:
            with contextlib.suppress(ValueError):  # it already received the engine's end
                incarnation.asked.remove(waiter)
            raise
        except asyncio.CancelledError:
            waiter.cancel()  # it keeps its place in the order of answers
            raise
        return await waiter

    def _make_engine(self) -> RolloutEngine:
        gpus = None if self._gpus_timeout_s is None else group_gpus(self._gpus_timeout_s)
        return self._factory() if gpus is None else self._factory(gpus=gpus)

    def _send(self, engine: RolloutEngine, command: Command, memory: Memory | None = None) -> asyncio.Future[None]:
        """Send on the call thread, which keeps the order of calls."""
        return asyncio.get_running_loop().run_in_executor(self._calls, engine.send, command, memory)

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
            node_id=_node_id(),
            reason=failure.reason if failure else self._reason,
            base_version=self._base.version,
            torch_loaded="torch" in sys.modules,
        )


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
