"""Rollout workers that sample nothing, to measure the driver itself: fakes that answer at once in this process, and an
engine for real Ray workers that plays the same events at a steady pace. No torch.
"""

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import Empty
from typing import Any, cast

import numpy as np
import ray
from ray import ObjectRefGenerator

from actors import loop
from actors.engine.process import RolloutEngine
from actors.rollout_worker import SupervisorStatus
from contracts.engine import Abort, Command, ReceiveWeights, Submit, UpdateWeights
from contracts.rollout import (
    EngineWindow,
    Event,
    Finished,
    FinishReason,
    Progress,
    Rollout,
    Sampled,
    WeightsLoaded,
)

SLOTS, TOKENS = 64, 128


@dataclass(frozen=True, slots=True)
class Mix:
    """The contents of one batch of a worker's events."""

    finished: int
    progress: int
    batches_per_window: int

    def events(self, running: deque[int], batch: int) -> list[Event]:
        """Return events: the oldest requests end, and the next ones progress."""
        ended = [running.popleft() for _ in range(min(self.finished, len(running)))]
        moved = [running[i] for i in range(min(self.progress, len(running)))]
        now_s = time.time()
        due = batch % self.batches_per_window == 0
        window = [replace(WINDOW, start_s=now_s - 0.1, end_s=now_s)] if due else []
        return [*(Progress(i, DELTA) for i in moved), *(Finished(rollout(i)) for i in ended), *window]


MIXES = {
    "one": Mix(finished=1, progress=4, batches_per_window=20),
    "several": Mix(4, progress=32, batches_per_window=1),
}


def part(tokens: int) -> Sampled:
    return Sampled(np.full(tokens, 5, np.int32), np.zeros(tokens, np.float32), np.zeros(tokens, np.float32))


WHOLE, DELTA = part(TOKENS), part(16)
WINDOW = EngineWindow(
    start_s=0.0,
    end_s=0.1,
    engine_steps=10,
    prefill_tokens=0,
    decode_tokens=640,
    running=SLOTS,
    waiting=0,
    kv_tokens_used=0,
)


UP = SupervisorStatus(
    name="",
    engine="running",
    running=0,
    waiting=0,
    weights_version=None,
    weights_checksum=None,
    restarts=0,
    pid=0,
    node_ip="",
    node_id="",
)


def rollout(request_id: int, reason: FinishReason = FinishReason.STOP) -> Rollout:
    return Rollout(
        request_id=request_id,
        sampled=WHOLE,
        finish_reason=reason,
        weights_version=0,
        started_s=0.0,
        finished_s=0.0,
    )


class Own:
    """The fakes' own share of this thread's CPU time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._since_s = time.thread_time()

    def __exit__(self, *exc_info: object) -> None:
        self.seconds += time.thread_time() - self._since_s


OWN = Own()


class Fleet:
    """Stands in for Ray. Calls are answered, and workers with work send events: one worker each time the driver has
    nothing left to take."""

    def __init__(self, mix: Mix) -> None:
        self.mix = mix
        self.busy: deque[Worker] = deque()
        self.told: deque[Callable[[], None]] = deque()  # commands taken; the driver learns of them with the next event
        self.asked: deque[Callable[[], None]] = deque()  # answers, delivered one by one
        self._queue: deque[Any] = deque()

    def instead_of_ray(self) -> None:
        """Replace Ray, permanently, in this process."""
        instead: Any = ray
        instead.kill = lambda *args, **kwargs: None
        instead.wait = lambda refs, **kwargs: (list(refs), [])
        cast(Any, loop).SimpleQueue = lambda: self

    def put(self, item: Any) -> None:
        self._queue.append(item)

    def get(self, timeout: float) -> Any:
        with OWN:
            while not self._queue:
                self._bring()
            return self._queue.popleft()

    def get_nowait(self) -> Any:
        if not self._queue:
            raise Empty
        return self._queue.popleft()

    def _bring(self) -> None:
        while self.told:
            self.told.popleft()()
        if self.asked:
            self.asked.popleft()()
        elif self.busy:
            worker = self.busy.popleft()
            worker.bring()
            if worker.has_work:
                self.busy.append(worker)


@dataclass(eq=False)
class Ref:
    """Stands in for Ray's ObjectRef: waiting callers are notified in turn."""

    value: Any
    line: deque[Callable[[], None]]

    def _on_completed(self, call: Callable[[Any], None]) -> None:
        with OWN:
            self.line.append(lambda: call(self.value))


class Stream(ObjectRefGenerator):  # type: ignore[misc]
    """The stream of a fake worker. It calls the worker's `expected` with the next events. `spoke`, called when the
    driver takes them, raises what has ended the stream."""

    def __init__(self, worker: Any) -> None:
        self._of = worker

    def _get_next_ref_n(self, num_refs: int) -> list[Any]:
        return [self]

    def _on_completed(self, call: Callable[[Any], None]) -> None:
        self._of.expected = call

    def __next__(self) -> Any:
        self._of.spoke()

    def __del__(self) -> None: ...


@dataclass(eq=False)
class Worker:
    """The handle of a worker in this process."""

    fleet: Fleet
    running: deque[int] = field(default_factory=deque)
    aborted: list[int] = field(default_factory=list)
    batches: int = 0
    expected: Callable[[Any], None] = lambda events: None

    def __getattr__(self, method: str) -> Any:
        """Return the method for handle.method.remote(...)."""
        calls: dict[str, Callable[..., Any]] = {
            "stream": lambda most: Stream(self),
            "tell": self._tell,
            "ask": self._ask,
        }
        return Remote(calls.get(method, lambda *_: Ref(UP, self.fleet.asked)))

    def spoke(self) -> None: ...

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.aborted)

    def bring(self) -> None:
        if self.aborted:
            events: list[Event] = [Finished(rollout(i, FinishReason.ABORT)) for i in self.aborted]
            self.aborted.clear()
            self.running.clear()
        else:
            self.batches += 1
            events = self.fleet.mix.events(self.running, self.batches)
        self.expected(events)

    def _tell(self, pickled: bytes, memory: object = None) -> Ref:
        with OWN:
            command: Command = pickle.loads(pickled)
            if not self.has_work and isinstance(command, Submit):
                self.fleet.busy.append(self)
            match command:
                case Submit(requests):
                    self.running.extend(request.request_id for request in requests)
                case Abort(request_ids):
                    self.aborted.extend(request_ids)
            return Ref(None, self.fleet.told)

    def _ask(self, command: Command, memory: Any = None) -> Ref:
        with OWN:
            return Ref(loaded(command), self.fleet.asked)


def loaded(command: Command) -> WeightsLoaded:
    """Return the answer of an engine that takes all weights, with checksum 0."""
    assert isinstance(command, UpdateWeights | ReceiveWeights)
    version = command.manifest.version if isinstance(command, UpdateWeights) else command.offer.version
    return WeightsLoaded(version=version, checksum=0, seconds=0.0)


class Remote:
    """A method of a handle."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class Replay(RolloutEngine):
    """A RolloutEngine that ends requests at a steady pace, without sampling anything."""

    def __init__(self, mix: Mix, period_s: float) -> None:
        self._mix, self._period_s = mix, period_s
        self._running: deque[int] = deque()
        self._aborted: list[int] = []
        self._batches = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def send(self, command: Command, memory: Any = None) -> None:
        with self._lock:
            match command:
                case Submit(requests):
                    self._running.extend(request.request_id for request in requests)
                case Abort(request_ids):
                    self._aborted.extend(request_ids)

    def poll(self, timeout_s: float) -> list[Event]:
        self._closed.wait(self._period_s)
        with self._lock:
            if self._aborted:
                events: list[Event] = [Finished(rollout(i, FinishReason.ABORT)) for i in self._aborted]
                self._aborted.clear()
                self._running.clear()
                return events
            if not self._running:
                return []
            self._batches += 1
            return self._mix.events(self._running, self._batches)

    def close(self, timeout_s: float = 5.0) -> None:
        self._closed.set()
