"""Episodes outside the driver: a Ray actor around a user's environment, and the driver's pool of these actors.

Assigns episodes to workers and replaces lost workers. A lost worker loses no episode: every call contains all actions
so far, so another worker replays them. It samples nothing and never blocks.

    pool = EnvironmentPool(options, context)
    pool.begin()
    pool.play(request_id, Call(...))
    pool.receive(arrived)    # what the loop brings: [(request_id, Answer)]
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, cast

import ray
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayError, RayTaskError

from actors.context import Context
from actors.environments.host import START_TIMEOUT_S, EnvironmentHost
from actors.identity import log_to, unique_name
from config.environments import EnvironmentOptions
from contracts.environments import EnvironmentAnswer, EnvironmentCall

_log = logging.getLogger(__name__)
_MAX_LOSSES = 3  # workers that one call may lose before it fails
_CLOSE_TIMEOUT_S = 5.0


class EnvironmentWorker:
    """A Ray actor by `ray.remote(EnvironmentWorker)`. Calls run concurrently on its event loop."""

    def __init__(self, options: EnvironmentOptions, name: str, log: str | None = None) -> None:
        """log: see log_to."""
        log_to(log, name)
        self._name, self._host = name, EnvironmentHost(options)

    def __repr__(self) -> str:
        return self._name

    @ray.method
    async def play(self, call: EnvironmentCall) -> EnvironmentAnswer:
        """Play one call; see EnvironmentHost.play."""
        answer = await self._host.play(call)
        if answer.error is not None:
            _log.warning("an environment failed: %s", answer.error)
        return answer

    @ray.method
    async def close(self) -> None:
        await self._host.close()


@dataclass(slots=True, eq=False)
class _TurnTask:
    key: int
    call: EnvironmentCall
    losses: int = 0


@dataclass(slots=True, eq=False)
class _EnvironmentSlot:
    handle: "ActorProxy[EnvironmentWorker]"
    heard_s: float
    asked: "dict[ray.ObjectRef[EnvironmentAnswer], _TurnTask]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EnvironmentArrived:
    """Result of a pending call to an environment worker: a value, or an exception instead."""

    ref: "ray.ObjectRef[EnvironmentAnswer]"
    value: Any


class EnvironmentPool:
    """`environment.workers` actors. Keys are request ids. Not thread-safe."""

    def __init__(
        self,
        options: EnvironmentOptions,
        context: Context,
        *,
        actor_options: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """`actor_options`: Ray's, evaluated at each worker's start. The observer gets the event
        environment_worker_replaced."""
        self._options, self._context, self._actor_options = options, context, actor_options
        # While it has calls, a worker answers one within this time: a close, a factory, a reset.
        self._silence_s = 3 * options.timeout_s + START_TIMEOUT_S
        self._round = 0
        self._workers = [self._start(index) for index in range(options.workers)]

    def begin(self) -> None:
        """Start another round and drop the open calls."""
        self._round += 1
        for worker in self._workers:
            worker.asked.clear()

    def play(self, key: int, call: EnvironmentCall) -> None:
        """Send a call; returns at once. All calls of an episode go to one worker while it lives."""
        self._ask(_TurnTask(key, replace(call, round=self._round)))

    def receive(self, arrived: EnvironmentArrived) -> list[tuple[int, EnvironmentAnswer]]:
        """Return the answers, or failures, that the event resolves."""
        for index, worker in enumerate(self._workers):
            if (task := worker.asked.pop(arrived.ref, None)) is not None:
                worker.heard_s = self._context.clock()
                if isinstance(arrived.value, EnvironmentAnswer):
                    return [(task.key, arrived.value)]
                return self._lost(index, task, arrived.value)
        return []

    def look(self) -> list[tuple[int, EnvironmentAnswer]]:
        """Replace silent workers, and return the calls that failed with them."""
        found: list[tuple[int, EnvironmentAnswer]] = []
        for index, worker in enumerate(self._workers):
            if worker.asked and self._context.clock() - worker.heard_s > self._silence_s:
                found += self._lost(index, None, TimeoutError(f"no answer for {self._silence_s:g} s"))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and their processes. Idempotent."""
        if closing := [worker.handle.close.remote() for worker in self._workers]:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_TIMEOUT_S)
        for worker in self._workers:
            _kill(worker)
        self._workers.clear()

    def _ask(self, task: _TurnTask) -> None:
        worker = self._workers[task.key % len(self._workers)]
        if not worker.asked:
            worker.heard_s = self._context.clock()
        ref = worker.handle.play.remote(task.call)
        worker.asked[ref] = task
        self._context.loop.expect(ref, partial(EnvironmentArrived, ref))

    def _lost(self, index: int, first: _TurnTask | None, error: Exception) -> list[tuple[int, EnvironmentAnswer]]:
        """Replace a lost or silent worker, and repeat its calls on the new one."""
        if isinstance(error, RayTaskError) and first is not None:  # the call itself failed, which is a bug
            return [(first.key, EnvironmentAnswer(error=_line(error)))]
        worker = self._workers[index]
        tasks = [*([first] if first is not None else []), *worker.asked.values()]
        worker.asked.clear()
        _kill(worker)
        self._workers[index] = self._start(index)
        self._context.observer.event(
            "environment_worker_replaced",
            f"environment worker {index}: {_line(error)}; {len(tasks)} episodes are played again up to where they were",
        )
        failed: list[tuple[int, EnvironmentAnswer]] = []
        for task in tasks:
            task.losses += 1
            if task.losses >= _MAX_LOSSES:
                failed.append(
                    (task.key, EnvironmentAnswer(error=f"{task.losses} environment workers were lost: {_line(error)}"))
                )
            else:
                self._ask(task)
        return failed

    def _start(self, index: int) -> _EnvironmentSlot:
        name = f"environment-{index}"
        options = {"num_cpus": 0, **self._actor_options(), "name": unique_name(name)}
        actor = ray.remote(EnvironmentWorker).options(**options, max_concurrency=1 << 16)
        return _EnvironmentSlot(actor.remote(self._options, name, self._context.log(name)), self._context.clock())


def _line(error: Exception) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return f"{type(cause).__name__}: {(str(cause).strip().splitlines() or ['no message'])[0]}"


def _kill(worker: _EnvironmentSlot) -> None:
    try:
        ray.kill(cast("ActorHandle[EnvironmentWorker]", worker.handle), no_restart=True)
    except RayError:
        _log.warning("an environment worker could not be ended", exc_info=True)
