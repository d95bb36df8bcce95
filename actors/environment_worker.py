"""Episodes outside the driver: a Ray actor around a user's environment, and the pool through which the driver asks
many.

Owns which worker plays which episode, and their replacement. Nothing of an episode is lost with a worker: every call
brings all actions so far, so another one plays it again up to there. Never decides what is sampled, and never waits.

    pool = EnvironmentPool(options, wake=dispatcher.wake)
    pool.begin()
    pool.play(request_id, Call(...))
    for request_id, answer in pool.poll(): ...
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Self, cast

import ray
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayError, RayTaskError

from actors.environments.host import START_TIMEOUT_S, EnvironmentHost
from actors.identity import log_to, unique_name
from config.environments import EnvironmentOptions
from contracts.environments import Answer, Call

_log = logging.getLogger(__name__)
_MAX_LOSSES = 3  # workers that one call may lose
_CLOSE_TIMEOUT_S = 5.0


class EnvironmentWorker:
    """Make it an actor with `ray.remote(EnvironmentWorker)`. Calls run side by side on its event loop."""

    def __init__(self, options: EnvironmentOptions, name: str, log: str | None = None) -> None:
        """log: see log_to."""
        log_to(log, name)
        self._name, self._host = name, EnvironmentHost(options)

    def __repr__(self) -> str:
        return self._name

    @ray.method
    async def play(self, call: Call) -> Answer:
        """See EnvironmentHost.play."""
        answer = await self._host.play(call)
        if answer.error is not None:
            _log.warning("an environment failed: %s", answer.error)
        return answer

    @ray.method
    async def close(self) -> None:
        await self._host.close()


@dataclass(slots=True, eq=False)
class _Task:
    key: int
    call: Call
    losses: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    handle: "ActorProxy[EnvironmentWorker]"
    heard_s: float
    asked: "dict[ray.ObjectRef[Answer], _Task]" = field(default_factory=dict)


class EnvironmentPool:
    """`environment.workers` actors. Keys are request ids. Not thread-safe, but for what Ray brings."""

    def __init__(
        self,
        options: EnvironmentOptions,
        *,
        wake: Callable[[], None] = lambda: None,
        actor_options: Callable[[], Mapping[str, Any]] = dict,
        on_event: Callable[[str, str], None] = lambda kind, message: None,
        clock: Callable[[], float] = time.monotonic,
        log: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        """`actor_options`: Ray's, for each worker whenever it starts.
        `wake`, from another thread: an answer is there. `on_event(kind, message)`: environment_worker_replaced."""
        self._options, self._wake, self._on_event, self._clock, self._log_of = options, wake, on_event, clock, log
        self._actor_options = actor_options
        # A worker answers something within this, as long as it has anything to answer: a close, a factory, a reset.
        self._silence_s = 3 * options.timeout_s + START_TIMEOUT_S
        self._round = 0
        self._arrived: SimpleQueue[tuple[ray.ObjectRef[Answer], Any]] = SimpleQueue()
        self._workers = [self._start(index) for index in range(options.workers)]

    def begin(self) -> None:
        """Another round: whatever is still open is of no interest any more."""
        self._round += 1
        for worker in self._workers:
            worker.asked.clear()

    def play(self, key: int, call: Call) -> None:
        """Ask; returns at once. All calls of an episode go to one worker, as long as it lives."""
        self._ask(_Task(key, replace(call, round=self._round)))

    def poll(self) -> list[tuple[int, Answer]]:
        """What has been answered. Never waits."""
        found: list[tuple[int, Answer]] = []
        while True:
            try:
                ref, value = self._arrived.get_nowait()
            except Empty:
                break
            for index, worker in enumerate(self._workers):
                if (task := worker.asked.pop(ref, None)) is not None:
                    worker.heard_s = self._clock()
                    if isinstance(value, Answer):
                        found.append((task.key, value))
                    else:
                        found += self._lost(index, task, value)
        for index, worker in enumerate(self._workers):
            if worker.asked and self._clock() - worker.heard_s > self._silence_s:
                error = TimeoutError(f"no answer for {self._silence_s:g} s")
                found += self._lost(index, None, error)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and their processes. Twice is fine."""
        if closing := [worker.handle.close.remote() for worker in self._workers]:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_TIMEOUT_S)
        for worker in self._workers:
            _kill(worker)
        self._workers.clear()

    def _ask(self, task: _Task) -> None:
        worker = self._workers[task.key % len(self._workers)]
        if not worker.asked:
            worker.heard_s = self._clock()
        ref = worker.handle.play.remote(task.call)
        worker.asked[ref] = task
        ref._on_completed(partial(self._put, ref))

    def _put(self, ref: "ray.ObjectRef[Answer]", value: Any) -> None:
        self._arrived.put((ref, value))
        self._wake()

    def _lost(self, index: int, first: _Task | None, error: Exception) -> list[tuple[int, Answer]]:
        """A worker is gone, or silent: all that it had is asked again of another one."""
        if isinstance(error, RayTaskError) and first is not None:  # it lives: the call itself failed, as none should
            return [(first.key, Answer(error=_line(error)))]
        worker = self._workers[index]
        tasks = [*([first] if first is not None else []), *worker.asked.values()]
        worker.asked.clear()
        _kill(worker)
        self._workers[index] = self._start(index)
        self._on_event(
            "environment_worker_replaced",
            f"environment worker {index}: {_line(error)}; {len(tasks)} episodes are played again up to where they were",
        )
        failed: list[tuple[int, Answer]] = []
        for task in tasks:
            task.losses += 1
            if task.losses >= _MAX_LOSSES:
                failed.append((task.key, Answer(error=f"{task.losses} environment workers were lost: {_line(error)}")))
            else:
                self._ask(task)
        return failed

    def _start(self, index: int) -> _Worker:
        name = f"environment-{index}"
        options = {"num_cpus": 0, **self._actor_options(), "name": unique_name(name)}
        actor = ray.remote(EnvironmentWorker).options(**options, max_concurrency=1 << 16)
        return _Worker(actor.remote(self._options, name, self._log_of(name)), self._clock())


def _line(error: Exception) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return f"{type(cause).__name__}: {(str(cause).strip().splitlines() or ['no message'])[0]}"


def _kill(worker: _Worker) -> None:
    try:
        ray.kill(cast("ActorHandle[EnvironmentWorker]", worker.handle), no_restart=True)
    except RayError:
        _log.warning("an environment worker could not be ended", exc_info=True)
