"""Drafter training in a rollout worker's idle time: its spot trainer, and its link to the coordinator.

Manages the states BUSY, IDLE and TRAINING of one worker, and supplies its trainer with data. It never delays work: on
receiving requests, a worker stops training within `stop_timeout_s` without asking, and reports it afterwards. A failure
here costs drafter training, never a rollout.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from actors.spot.process import SpotTrainer
from config.coordinator import CoordinatorOptions
from contracts.coordinator import State, Stop, Train
from contracts.records import SequenceRecord
from contracts.rollout import DrafterFailed, DrafterLoaded, Recorded
from contracts.spot import (
    Checkpointed,
    ContinueFrom,
    MicroStep,
    NeedData,
    PublishDrafter,
    SetTarget,
    Skipped,
    SpotCommand,
    StartTraining,
    StopTraining,
    TrainedWeights,
    TrainerEvent,
    TrainFailed,
    TrainOn,
    TrainSession,
    TrainStarted,
    TrainStopped,
)
from coordinator.member import Identity
from coordinator.transport.client import WorkerClient
from coordinator.transport.security import ClientKeys
from drafter.training.cut import cut_head
from models.manifest import WeightsManifest

_log = logging.getLogger(__name__)
_POLL_S = 0.05
_BUFFER_TIMEOUT_S = 5.0
_LOOPBACK = "127.0.0.1"
_PUBLISHED = 3  # versions kept for download
_RETRY_S = (0.5, 2.0, 10.0)  # delay of each restart after consecutive trainer failures; then training is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPlan:
    """Settings for a worker's drafter training. Picklable."""

    factory: Callable[[str], SpotTrainer]  # starts its process, reachable for others at this address; may take seconds
    endpoint: str  # of the coordinator
    coordinator: CoordinatorOptions
    stop_timeout_s: float
    group: str = "all"  # only workers of one group train together
    keys: ClientKeys | None = None


@dataclass(frozen=True, slots=True)
class RecordingReport:
    """An engine's `Recorded` event without its rows, which went to the data buffer."""

    sequences: int
    bytes: int
    seconds: float  # of recording, in engine steps
    skipped: int
    failure: str = ""


TrainingEvent = MicroStep | TrainStopped | Checkpointed | TrainFailed | RecordingReport
SpotEvent = TrainingEvent | TrainedWeights
DrafterEvent = TrainingEvent | DrafterFailed | DrafterLoaded  # all events about a trained drafter except its weights


class SpotHost:
    """Lives on the event loop of its RolloutWorker; every method but the constructor's callbacks runs there.

    It has a trainer from `start_trainer` on, and reports IDLE to the coordinator only while it has one, since it could
    not train without.
    """

    def __init__(
        self,
        name: str,
        node: str,
        incarnation: int,
        plan: SpotPlan,
        *,
        pause: Callable[[], Awaitable[None]],
        resume: Callable[[], Awaitable[None]],
        emit: Callable[[SpotEvent], None],
    ) -> None:
        """`node`: its address. `pause` releases the engine's memory (ValueError: it has requests), `resume` restores
        it."""
        self._name, self._plan = name, plan
        # If the coordinator is on loopback, so are all workers.
        self._host = _LOOPBACK if f"//{_LOOPBACK}:" in plan.endpoint else node
        here = ray.get_runtime_context().get_node_id()
        self._buffer: Any = None  # handle of this node's DataBufferActor, once the driver knows the node
        self._pause, self._resume, self._emit = pause, resume, emit
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()  # serialises changes between decoding and training
        self._busy, self._paused = True, False
        self._barred = False  # no session may start here: see stand_still
        self._session: TrainSession | None = None
        self._halted = asyncio.Event()  # set while the trainer is stopped
        self._halted.set()
        self._target: tuple[WeightsManifest, NDArray[np.uint8]] | None = None
        self._drafter: tuple[WeightsManifest, NDArray[np.uint8]] | None = None  # common starting point of all workers
        self._reached = 0  # latest version reported by the trainer
        self._published: dict[int, tuple[WeightsManifest, NDArray[np.uint8]]] = {}  # the last ones, by version
        self._trainer: SpotTrainer | None = None
        self._newest: SpotTrainer | None = None  # last started; set by the starting thread
        self._starts = False  # `start_trainer` was called
        self._reader: threading.Thread | None = None
        self._failures = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = threading.Event()
        self._client = WorkerClient(
            plan.endpoint,
            Identity(name, incarnation, node, plan.group, here),
            plan.coordinator,
            keys=plan.keys,
            on_command=lambda command: self._post(self._obey, command),
        )

    # Calls of the worker.

    def start_trainer(self) -> None:
        """Start the trainer, which takes seconds of a core. Idempotent; one that fails later is started again."""
        if not self._starts:
            self._starts = True
            self._task(self._start())

    def use_buffer(self, buffer: Any) -> None:
        """Set the data buffer that receives and supplies sequences."""
        self._buffer = buffer

    async def begin_work(self, requests: int) -> None:
        """Prepare for requests; return once the engine has its memory back, whatever the trainer does."""
        self._barred = False
        async with self._lock:
            if not self._busy:
                self._busy = True
                await self._halt(self._plan.stop_timeout_s)
            self._client.busy(requests)
            if self._paused:
                self._paused = False
                await self._resume()

    def out_of_work(self) -> None:
        """The engine has nothing left to do: report IDLE."""
        if self._busy and not self._lock.locked():
            self._busy = False
            if self._trainer is not None:
                self._client.idle()

    async def stand_still(self) -> None:
        """Free the device; return once the trainer has stopped, or was killed after `stop_timeout_s`.

        No session starts here, not even a pending one, until the target's weights change or requests arrive."""
        self._barred = True
        async with self._lock:
            await self._halt(self._plan.stop_timeout_s)

    def recorded(self, event: Recorded) -> None:
        """Send newly recorded sequences to the data buffer."""
        self._emit(RecordingReport(len(event.records), event.bytes, event.seconds, event.skipped, event.failure))
        if event.records:
            self._task(self._hand_over(list(event.records)))

    async def _hand_over(self, records: list[SequenceRecord]) -> None:
        assert self._buffer is not None, "use_buffer comes before the first request"
        try:
            await asyncio.wait_for(self._buffer.add.remote([ray.put(records)]), _BUFFER_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            _log.warning("%s: %d recorded sequences are lost: %s", self._name, len(records), error)

    async def engine_lost(self) -> None:
        """Prepare for a new engine, which needs the memory and starts awake."""
        async with self._lock:
            self._busy = True
            await self._halt(self._plan.stop_timeout_s)
            self._client.busy(0)
            self._paused = False

    async def target_changed(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> None:
        """Send the engine's new target weights to the trainer."""
        self._target, self._barred = (manifest, buffer), False
        if self._trainer is not None:
            await self._tell_target(self._trainer, manifest, buffer)

    async def drafter_changed(self, manifest: WeightsManifest, payload: NDArray[np.uint8]) -> None:
        """Continue from these drafter weights, as every worker does. A trainer that has made a later version keeps its
        own: the larger version is the newer (`policies.drafter.lineage`)."""
        self._drafter = manifest, payload
        if self._trainer is not None and manifest.version >= self._reached:
            self._reached = manifest.version
            await self._tell(self._trainer, ContinueFrom(manifest, payload))

    def published(self, version: int) -> tuple[WeightsManifest, NDArray[np.uint8]]:
        """Return the weights that a trainer here published under this version. Raises KeyError if newer ones replaced
        them."""
        return self._published[version]

    async def close(self) -> None:
        """End the trainer, even one that is starting, and leave the coordinator."""
        self._closing.set()
        for task in self._tasks:
            task.cancel()
        self._trainer = None  # its further events are ignored
        await asyncio.to_thread(self._client.close)
        if self._newest is not None:
            await asyncio.to_thread(self._newest.close)
        if self._reader is not None:
            await asyncio.to_thread(self._reader.join)

    # Commands of the coordinator.

    def _obey(self, command: Train | Stop) -> None:
        match command:
            case Train(session=session, epoch=epoch, members=members, store=store):
                self._task(self._train(TrainSession(session, epoch, members, members.index(self._name), store)))
            case Stop(session=session, within_s=within_s):
                self._task(self._stop(session, within_s))
            case _:
                assert_never(command)

    async def _train(self, session: TrainSession) -> None:
        async with self._lock:
            if self._busy or self._barred or self._client.state is not State.TRAINING:
                return  # Work or a stop came first, or is imminent.
            if self._trainer is None:
                self._client.trainer_failed(session.session, "its trainer is not up")
                return
            if self._session is None:
                try:
                    await self._pause()
                except Exception as error:  # Requests have reached the engine meanwhile, or it is gone.
                    _log.info("%s does not train: %s", self._name, error)
                    self._busy = True
                    self._client.busy()
                    return
                self._paused = True
            self._session = session
            self._halted.clear()
            await self._tell(self._trainer, StartTraining(session))

    async def _stop(self, session: int, within_s: float) -> None:
        async with self._lock:
            if self._session is not None and self._session.session == session:
                await self._halt(within_s)
            self._client.stopped(session)

    async def _halt(self, within_s: float) -> None:
        """Stop the trainer; kill it if it has not stopped in time."""
        if self._session is None or self._trainer is None:
            return
        await self._tell(self._trainer, StopTraining(time.time()))
        try:
            await asyncio.wait_for(self._halted.wait(), within_s)
        except TimeoutError:
            trainer, self._trainer = self._trainer, None
            await asyncio.to_thread(trainer.kill)
            self._failed(f"did not stop within {within_s:g} s and was killed")

    # Events of the trainer.

    def _heard(self, trainer: SpotTrainer, event: TrainerEvent) -> None:
        if trainer is not self._trainer:
            return  # from a killed one
        session = self._session
        match event:
            case TrainStarted(session=number, epoch=epoch, store=store):
                self._client.started(number, epoch, store)
            case NeedData():
                if session is not None:
                    self._task(self._feed(trainer, session.session, event.tokens))
            case MicroStep():
                self._failures, self._reached = 0, max(event.step, self._reached)
                self._client.progress(step=event.step)
                self._emit(event)
            case TrainStopped(reason=reason):
                self._emit(event)
                if session is None or session.session != event.session:
                    return  # a repetition: it stopped by itself before the command
                self._session = None
                self._halted.set()
                if session.rank == 0:
                    self._task(self._tell(trainer, PublishDrafter()))
                if reason:  # not to be retried at once
                    self._client.trainer_failed(event.session, reason)
                else:
                    self._client.stopped(event.session)
            case TrainedWeights(manifest, payload):
                if self._drafter is not None and manifest.version < self._drafter[0].version:
                    self._task(self._tell(trainer, ContinueFrom(*self._drafter)))  # made from discarded weights
                    return
                self._reached = max(manifest.version, self._reached)
                assert payload is not None
                self._published[manifest.version] = manifest, payload
                while len(self._published) > _PUBLISHED:
                    del self._published[next(iter(self._published))]
                self._emit(TrainedWeights(manifest))
            case Checkpointed():
                self._emit(event)
            case TrainFailed(reason):
                self._trainer = None
                self._task(asyncio.to_thread(trainer.kill))  # leaves no process behind
                self._failed(reason)
            case Skipped(records, reason):
                _log.warning("%s: its trainer did not learn from %d sequences: %s", self._name, records, reason)
            case _:
                assert_never(event)

    def _failed(self, reason: str) -> None:
        """Report the lost trainer, and start another one a little later."""
        session, self._session = self._session, None
        self._halted.set()
        if session is not None:
            self._client.trainer_failed(session.session, reason)
        self._client.busy(0)  # it cannot train
        self._emit(TrainFailed(reason))
        self._failures += 1
        if self._failures <= len(_RETRY_S):
            self._task(self._start(_RETRY_S[self._failures - 1]))

    async def _feed(self, trainer: SpotTrainer, session: int, tokens: int) -> None:
        """Send sequences until the trainer has some or the session ends."""
        version = self._target[0].version if self._target else 0
        while self._session is not None and self._session.session == session:
            records: list[SequenceRecord] = []
            try:
                if self._buffer is not None:  # otherwise the driver does not know yet that the engine is up
                    asked = self._buffer.sample.remote(tokens, version=version)
                    records = await asyncio.wait_for(asked, _BUFFER_TIMEOUT_S)
            except (RayError, TimeoutError) as error:
                _log.warning("%s: the data buffer does not answer: %s", self._name, error)
            if records:
                await self._tell(trainer, TrainOn(tuple(records)))
                return
            await asyncio.sleep(0.1)

    async def _start(self, delay_s: float = 0.0) -> None:
        await asyncio.sleep(delay_s)
        try:
            trainer = await asyncio.to_thread(self._spawn)
        except Exception as error:
            self._failed(str(error))
            return
        told = None
        while told is not self._target:  # which may change again meanwhile
            assert self._target is not None
            told = self._target
            await self._tell_target(trainer, *told)
        self._trainer, self._reached = trainer, 0
        self._reader = threading.Thread(target=self._read, args=(trainer,), name=f"{self._name}-trainer", daemon=True)
        self._reader.start()
        await self._tell(trainer, PublishDrafter())  # its first weights: fresh, given, or from a checkpoint
        if not self._busy and self._trainer is trainer:
            self._client.idle()

    def _spawn(self) -> SpotTrainer:
        """Start a trainer, on a thread that outlives a cancelled task. If `close` has run meanwhile, end the trainer
        again."""
        trainer = self._newest = self._plan.factory(self._host)
        if self._closing.is_set():
            trainer.kill()
        return trainer

    def _read(self, trainer: SpotTrainer) -> None:
        while not self._closing.is_set():
            for event in trainer.poll(_POLL_S):
                self._post(partial(self._heard, trainer), event)
                if isinstance(event, TrainFailed):
                    return

    # Plumbing.

    def _post(self, function: Callable[[Any], None], argument: object) -> None:
        """Call a function on the event loop, from another thread."""
        with suppress(RuntimeError):  # the loop is closed: the worker is ending
            self._loop.call_soon_threadsafe(function, argument)

    def _task(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_target(self, trainer: SpotTrainer, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> None:
        await self._tell(trainer, SetTarget(*await asyncio.to_thread(cut_head, manifest, buffer)))

    async def _tell(self, trainer: SpotTrainer, command: SpotCommand) -> None:
        """Send the trainer a command. If it has died, its events report it."""
        try:
            await asyncio.to_thread(trainer.send, command)
        except Exception as error:
            _log.warning("%s: its trainer took no command: %s", self._name, error)
