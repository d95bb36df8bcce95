"""The dispatcher with many workers that are lost, join, leave and repeat themselves, against the dumbest of oracles:
every response as one worker alone would have sampled it, once. No Ray and no clock: fakes, whose order is drawn."""

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import Empty
from random import Random
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError

from actors import loop
from actors.incarnation import Leaving
from benchmarks.alone import DispatcherAlone
from benchmarks.driver_fakes import UP, Ref, Remote, Stream, loaded
from config.rollout import EngineOptions, RolloutOptions, WorkerCount
from contracts.engine import Abort, Submit
from contracts.rollout import Finished, FinishReason, Progress, Request, Rollout, Sampled, SamplingParams
from launch.dispatch import dispatcher as dispatcher_module

SLOTS = 4


def response(request: Request) -> Sampled:
    """What any worker samples of it: a function of its noise alone."""
    rng = np.random.default_rng(request.noise_key)
    tokens = rng.integers(0, 100, 1 + request.noise_key % request.sampling.max_new_tokens).astype(np.int32)
    return Sampled(tokens, -tokens.astype(np.float32), np.zeros(len(tokens), np.float32))


@dataclass(eq=False)
class Running:
    request: Request
    known: int  # tokens


@dataclass(eq=False)
class Worker:
    """Handle of one engine's worker; a restart makes `ended` False again."""

    name: str
    fleet: "Fleet"
    running: dict[int, Running] = field(default_factory=dict)
    told: list[Any] = field(default_factory=list)  # events, not taken yet
    said: list[Any] = field(default_factory=list)
    expected: Callable[[Any], None] | None = None  # None: nobody waits for what it says
    dead: bool = False
    ended: bool = False

    def __getattr__(self, method: str) -> Any:
        calls: dict[str, Callable[..., Any]] = {
            "tell": self._tell,
            "ask": lambda command, memory=None: Ref(loaded(command), self.fleet.todo),
            "stream": lambda most: Stream(self),
            "restart_engine": self._restart,
            "shutdown": lambda: Ref(None, self.fleet.todo),
        }
        return Remote(calls[method])

    def spoke(self) -> None:
        if self.dead:
            raise ActorDiedError
        if self.ended:
            raise StopIteration

    def _restart(self) -> Ref:
        self.running.clear()
        self.told.clear()
        self.expected, self.ended = None, False
        return Ref(replace(UP, name=self.name), self.fleet.todo)

    def _tell(self, pickled: bytes, memory: object = None) -> Ref:
        match pickle.loads(pickled):
            case Submit(requests):
                for request in requests:
                    self.running[request.request_id] = Running(request, len(request.prefix or ()))
                assert len(self.running) <= SLOTS
            case Abort(request_ids):
                for request_id in request_ids:
                    if request_id in self.running:
                        self._finish(request_id, self.running[request_id].known, FinishReason.ABORT)
        return Ref(None, self.fleet.todo)

    def work(self, rng: Random) -> None:
        """Some of what it runs gets on, or ends; then what it has to say is said."""
        for request_id in [i for i in self.running if rng.random() < 0.5]:
            got = self.running[request_id]
            whole = response(got.request)
            after = min(got.known + rng.randint(1, 6), len(whole))
            if after == len(whole) and rng.random() < 0.7:
                self._finish(request_id, after, FinishReason.LENGTH)
            elif after > got.known:
                self.told.append(Progress(request_id, cut(whole, got.known, after)))
                got.known = after
        if self.expected is not None and self.told:
            say, self.expected = self.expected, None
            self.said, self.told = self.told, []
            say(self.said)

    def _finish(self, request_id: int, tokens: int, reason: FinishReason) -> None:
        whole = response(self.running.pop(request_id).request)
        self.told.append(
            Finished(
                Rollout(
                    request_id=request_id,
                    sampled=whole.first(tokens),
                    finish_reason=reason,
                    weights_version=0,
                    started_s=0.0,
                    finished_s=0.0,
                )
            )
        )

    def end(self, *, dead: bool) -> None:
        if self.expected is not None:
            say, self.expected = self.expected, None
            self.dead, self.ended = dead, True
            say(ActorDiedError() if dead else RuntimeError("the stream has ended"))


def cut(whole: Sampled, start: int, end: int) -> Sampled:
    return Sampled(whole.tokens[start:end], whole.logprobs[start:end], np.zeros(end - start, np.float32))


class Fleet:
    """In the place of Ray's queue: each time that nothing is left to take, something happens that the seed decides."""

    def __init__(self, seed: int, harm: float) -> None:
        self.rng, self.harm = Random(seed), harm
        self.todo: deque[Callable[[], None]] = deque()
        self.workers: list[Worker] = []
        self.now_s = 0.0
        self._queue: list[Any] = []

    def spawn(self, name: str) -> Any:
        self.workers.append(worker := Worker(name, self))
        return worker

    def put(self, item: Any) -> None:
        self._queue.append(item)

    def get(self, timeout: float) -> Any:
        for _ in range(50):
            self.now_s += 0.01
            if self._queue:
                return self._queue.pop(0)
            self._happen()
        raise Empty

    def get_nowait(self) -> Any:
        if not self._queue:
            raise Empty
        return self._queue.pop(0)

    def _happen(self) -> None:
        rng = self.rng
        if self.todo and rng.random() < 0.7:
            number = rng.randrange(len(self.todo))
            call = self.todo[number]
            del self.todo[number]
            call()
        elif alive := [worker for worker in self.workers if not worker.dead]:
            worker = rng.choice(alive)
            worker.work(rng)
            if rng.random() < self.harm:
                worker.end(dead=rng.random() < 0.5)
            elif rng.random() < self.harm:
                worker.told.extend(event for event in worker.said if isinstance(event, Finished))  # once more
            elif rng.random() < self.harm and worker.expected is not None:
                worker.told.append(Leaving("it was told to end"))


def some_requests(count: int, rng: np.random.Generator) -> list[Request]:
    return [
        Request(
            request_id=i,
            prompt_id=i // 4,
            prompt_tokens=np.arange(3, dtype=np.int32),
            noise_key=int(rng.integers(2**40)),
            sampling=SamplingParams(24),
            expected_tokens=float(rng.integers(1, 24)),
        )
        for i in range(count)
    ]


def instead_of_ray(fleet: Fleet, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop, "SimpleQueue", lambda: fleet)
    patch.setattr(ray, "kill", lambda handle, no_restart: setattr(handle, "dead", True))
    patch.setattr(dispatcher_module, "node_lost", lambda error, node_id: False)
    patch.setattr(ray, "get", lambda ref, timeout: ref)
    patch.setattr(ray, "wait", lambda refs, **kwargs: (list(refs), []))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 40),
    harm=st.sampled_from([0.0, 0.02, 0.1]),
    count=st.integers(1, 120),
)
def test_each_response_comes_once_and_whole_whoever_is_lost_joins_or_leaves(
    seed: int, workers: int, harm: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(seed, harm)
    with monkeypatch.context() as patch:
        instead_of_ray(fleet, patch)
        options = RolloutOptions(
            workers=WorkerCount.fixed(workers),
            engine=EngineOptions(max_running=SLOTS),
            max_retries=10**6,
            max_worker_restarts=10**6,
        )
        dispatcher = DispatcherAlone(fleet.spawn, options, clock=lambda: fleet.now_s, wall=lambda: fleet.now_s)
        fleet.harm = 0.0  # a worker that does not start ends the run
        dispatcher.start()
        fleet.harm = harm
        rng = np.random.default_rng(seed)
        requests = some_requests(count, rng)
        found: list[Rollout] = []
        joined = 0

        def tick() -> None:
            nonlocal joined
            now = dispatcher.workers()
            staying = [name for name, worker in now.items() if not worker.retiring]
            if fleet.rng.random() < 0.05:
                dispatcher.join(f"further-{joined}")
                joined += 1
            elif len(staying) > 1 and fleet.rng.random() < 0.05:
                dispatcher.leave(fleet.rng.choice(staying))

        stats = dispatcher.run(requests, found.append, tick=tick)
        dispatcher.close()
    assert sorted(rollout.request_id for rollout in found) == list(range(count))
    assert stats.finished == count
    assert not stats.failed
    for rollout in found:
        whole = response(requests[rollout.request_id])
        assert rollout.tokens.tolist() == whole.tokens.tolist()
        assert rollout.logprobs.tolist() == whole.logprobs.tolist()


def test_who_hands_back_while_nobody_listens_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint may keep the driver for longer than a worker that leaves is waited for."""
    fleet, found, events = Fleet(0, 0.0), list[Rollout](), list[tuple[str, str]]()
    instead_of_ray(fleet, monkeypatch)
    options = RolloutOptions(workers=WorkerCount.fixed(2), engine=EngineOptions(max_running=SLOTS))
    dispatcher = DispatcherAlone(
        fleet.spawn,
        options,
        on_event=lambda kind, message: events.append((kind, message)),
        clock=lambda: fleet.now_s,
        wall=lambda: fleet.now_s,
    )
    dispatcher.start()
    tokens = 0
    seen: list[bool] = []

    def tick() -> None:
        nonlocal tokens
        running = fleet.workers[0].running
        if tokens or not running:
            return
        for one in running.values():  # sampled, and not told yet
            one.known = len(response(one.request))
            tokens += one.known
        dispatcher.leave("rollout-0", "its node goes")
        with dispatcher.unheard():
            fleet.now_s += 60.0
        seen.append(dispatcher.handing_back)

    dispatcher.run(some_requests(40, np.random.default_rng(0)), found.append, tick=tick)
    (left,) = [message for kind, message in events if kind == "worker_left"]
    assert f"with {tokens} tokens" in left
    assert len(found) == 40
    assert (seen, dispatcher.handing_back) == ([True], False)
