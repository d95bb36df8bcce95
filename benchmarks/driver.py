"""The driver's cost per finished rollout, by open requests and by workers. Can one driver serve a large fleet?

The dispatcher, its ledger, the collector and the observer are the real ones; reward workers are replaced by a fake. In
`open` and `fleet` rollout workers and Ray are fakes too (`driver_fakes`) that answer one at a time, and their own time
is excluded. In `ray` there are real workers and streams, with an engine that samples nothing, and the time is all that
the deciding thread spends, including Ray's calls. `one`: every batch of events has the worst case, one finished rollout
and progress of four others, so each is followed by an assignment. `several`: four finished, progress of 32 and a
window. Detokenising is included. In `fleet` the fleet's tick is included, with a reservation that does not query Ray;
`look_us` is one of its looks, of which there are four a second. Times are the thread's CPU time.

    python -m benchmarks.driver [--open 1000 8192 65536] [--workers 16 64 256 1024] [--ray 16] [--rollouts 60000]
                                [--profile] [--before FILE] [--out FILE]
"""

import cProfile
import gc
import pstats
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any, cast

import numpy as np

from actors.data import Prompt
from actors.loop import Look
from actors.reward_pool import RewardPool
from actors.rewards import Grade, GradeItem
from benchmarks.alone import AllVouched, Starts, spawner
from benchmarks.driver_fakes import MIXES, OWN, SLOTS, TOKENS, Fleet, Mix, Replay, Worker
from benchmarks.harness import RESULTS, command, load, write
from contracts.handoff import Offer, Sent
from contracts.rollout import EngineWindow, Finished, SamplingParams
from examples.guess_and_check.make_data import build_tokenizer
from launch.batch import Batch, Pick
from launch.cluster.session import ray_session
from launch.config import Config
from launch.context import RunContext
from launch.dispatch import (
    RolloutDispatcher,
    Weights,
    WorkerArrived,
    WorkerChanged,
    WorkerNews,
    worker_name,
)
from launch.fleet import Autoscaler
from launch.fleet import Fleet as Elastic
from launch.interrupt import Interrupt
from launch.observe import Observer
from launch.run.collect import Collector
from launch.run.reactions import show_window
from models.manifest import WeightsManifest

SAMPLES, OPEN_WORKERS, PERIOD_S = 8, 8, 0.05
LOOKS = 20
WINDOWS = 8  # of rollouts; the slowest and the median are reported


class Enough(BaseException):
    """The timed rollouts have arrived."""


def prompt(prompt_id: int) -> Prompt:
    tokens = np.arange(8, dtype=np.int32)
    return Prompt(prompt_id=prompt_id, uid=str(prompt_id), text="p", tokens=tokens, record={}, where="here")


class Pool:
    """A stand-in for the reward pool that grades at once."""

    def __init__(self) -> None:
        self._grades: dict[int, Grade] = {}

    def begin(self, groups: Sequence[range], *, same_step: bool) -> None:
        self._grades = {}

    def submit(self, key: int, item: GradeItem) -> None:
        self._grades[key] = Grade(value=0.0)

    def drain(self) -> dict[int, Grade]:
        return self._grades


class Watch:
    """Times of finished rollouts, and the fakes' share of them."""

    def __init__(self, rollouts: int, profile: cProfile.Profile | None) -> None:
        self._rollouts, self._profile = rollouts, profile
        self.begin_s = time.thread_time()
        self.times_s, self.own_s = deque[float](), deque[float]()

    def finished(self) -> None:
        self.times_s.append(time.thread_time())
        self.own_s.append(OWN.seconds)
        if self._profile is not None and len(self.times_s) == 1:
            self._profile.enable()
        if len(self.times_s) > self._rollouts:
            raise Enough

    def found(self) -> dict[str, float]:
        times = np.array(self.times_s) - np.array(self.own_s)
        windows = [float(w[-1] - w[0]) / (len(w) - 1) * 1e6 for w in np.array_split(times, WINDOWS)]
        return {
            "rollouts": len(times),
            "us_per_rollout": round(float(times[-1] - times[0]) / (len(times) - 1) * 1e6, 1),
            "median_us": round(median(windows), 1),
            "slowest_window_us": round(max(windows), 1),
            "until_first_ms": round((self.times_s[0] - self.begin_s) * 1e3, 1),
        }


@contextmanager
def observer(folder: Path) -> Iterator[Observer]:
    observe = {"live": False, "tensorboard": False}
    config = Config.model_validate(
        {"run": {"name": "driver", "steps": 1}, "model": {"path": "m"}, "data": {"train": "t"}, "observe": observe}
    )
    with tempfile.TemporaryDirectory(dir=folder) as run_dir, Observer(Path(run_dir), config) as opened:
        yield opened


@dataclass
class Driver:
    """The part of a run's reactions that is measured."""

    context: RunContext
    dispatcher: RolloutDispatcher
    collector: Collector | None = None
    fleet: Elastic | None = None

    def __post_init__(self) -> None:
        self.context.loop.react_with(self._react)

    def _react(self, event: Any) -> None:
        match event:
            case WorkerArrived():
                self.dispatcher.receive(event)
            case Finished(rollout):
                if self.collector is not None:
                    self.collector.ended(rollout)
            case WorkerNews(worker, EngineWindow() as window):
                show_window(self.context.observer, worker, window, strategies=False)
            case WorkerChanged(kind, worker, message):
                self.context.observer.event(kind, f"{worker}: {message}")
            case Look():
                self.dispatcher.look()
                if self.fleet is not None:
                    self.fleet.look()


def context_of(seen: Observer, config: Config) -> RunContext:
    return RunContext(config=config, observer=seen, interrupt=Interrupt(), run_dir=Path())


def config_of(workers: int) -> Config:
    """Return the configuration of a run with `workers` workers of SLOTS requests each."""
    rollout = {"workers": workers, "engine": {"max_running": SLOTS}}
    return Config.model_validate(
        {"run": {"name": "driver", "steps": 1}, "model": {"path": "m"}, "data": {"train": "t"}, "rollout": rollout}
    )


def sample(driver: Driver, requests: int, rollouts: int, profile: cProfile.Profile | None = None) -> dict[str, float]:
    """Run one round of `requests` requests, of which the first `rollouts` are timed."""
    seen = driver.context.observer
    rng = np.random.default_rng(0)
    prompts = requests // SAMPLES
    batch = Batch(
        [Pick(0, prompt(i)) for i in range(prompts)],
        [SAMPLES] * prompts,
        SamplingParams(TOKENS),
        seed=0,
        expected_tokens=list(rng.uniform(8, TOKENS, prompts)),
    )
    gc.collect()
    watch = Watch(min(rollouts, requests - 1), profile)
    progress = seen.progress

    def told(*args: Any) -> None:
        progress(*args)
        watch.finished()

    cast(Any, seen).progress = told
    collector = Collector(driver.context, driver.dispatcher, cast(RewardPool, Pool()), build_tokenizer())
    driver.collector = collector
    OWN.seconds = 0.0
    with suppress(Enough):
        collector.run(batch, "rollout")
    if profile is not None:
        profile.disable()
    cast(Any, seen).progress = progress
    return watch.found()


@contextmanager
def fakes(workers: int, mix: Mix, seen: Observer) -> Iterator[Driver]:
    """Yield a dispatcher of workers in this process, not started."""
    fleet = Fleet(mix)
    fleet.instead_of_ray()
    context = context_of(seen, config_of(workers))
    yield Driver(
        context, RolloutDispatcher(cast(Any, Starts(lambda name: Worker(fleet))), context.config.rollout, context)
    )


def by_open(requests: int, rollouts: int, folder: Path, profile: cProfile.Profile | None = None) -> dict[str, float]:
    with observer(folder) as seen, fakes(OPEN_WORKERS, MIXES["one"], seen) as driver:
        driver.dispatcher.start()
        return {"open": requests, **sample(driver, requests, rollouts, profile)}


class Places:
    """A stand-in for the placement: all workers have a place."""

    def __init__(self, workers: int) -> None:
        self._names = dict.fromkeys(worker_name(index) for index in range(workers))

    def look(self) -> AbstractContextManager[None]:
        return nullcontext()

    def placed(self) -> Any:
        return self._names.keys()


class Sending:
    """The learner's end of a hand-over that every worker receives."""

    def offer(self, receiver: int) -> Offer:
        return Offer(store="", name="", version=2, tensors=(), total_bytes=0, receiver=receiver, limit_s=60.0)

    def finish(self) -> Any:
        sent = Sent(version=2, checksum=0, total_bytes=0, seconds=0.0, ways=())
        return sent, WeightsManifest(2, 0, (), 0), None


def by_workers(
    workers: int, mix: str, requests: int, rollouts: int, folder: Path, profile: cProfile.Profile | None = None
) -> dict[str, Any]:
    """Measure a round of `requests` requests, with SLOTS running on every worker."""

    def timed_us(call: Callable[[], object]) -> float:
        """Return the time per worker."""
        gc.collect()  # of earlier objects
        OWN.seconds, begin_s = 0.0, time.thread_time()
        call()
        return round((time.thread_time() - begin_s - OWN.seconds) / workers * 1e6, 1)

    weights = Weights(WeightsManifest(1, 0, (), 0), cast(Any, None))
    with observer(folder) as seen, fakes(workers, MIXES[mix], seen) as driver:
        nobody, places = Autoscaler(cast(Any, None), there=False), cast(Any, Places(workers))
        learner: Any = SimpleNamespace(busy=False)
        sending: Any = Sending()
        dispatcher = driver.dispatcher
        fleet = Elastic(dispatcher, places, learner, AllVouched(), None, nobody, driver.context)
        start_us = timed_us(fleet.start)
        driver.fleet = fleet
        found = sample(driver, requests, rollouts, profile)
        return {
            "workers": workers,
            "mix": mix,
            "open": requests,
            **found,
            "look_us": round(timed_us(lambda: [fleet.take() for _ in range(LOOKS)]) * workers / LOOKS, 1),
            "start_us_per_worker": start_us,
            "publish_us_per_worker": timed_us(lambda: dispatcher.set_weights(weights.manifest, weights.ref)),
            "hand_over_us_per_worker": timed_us(lambda: dispatcher.hand_over(lambda receivers: sending)),
            "close_us_per_worker": timed_us(dispatcher.close),
        }


def with_ray(workers: int, mix: str, rollouts: int, folder: Path) -> dict[str, Any]:
    """Measure real workers and streams. `process_us`: of all threads of the driver's process, including Ray's."""
    with observer(folder) as seen:
        context = context_of(seen, config_of(workers))
        spawn = spawner(lambda name: partial(Replay, MIXES[mix], PERIOD_S))
        dispatcher = RolloutDispatcher(cast(Any, Starts(spawn)), context.config.rollout, context)
        driver = Driver(context, dispatcher)
        dispatcher.start()
        process_s = time.process_time()
        found = sample(driver, 2 * rollouts, rollouts)
        process_us = round((time.process_time() - process_s) / found["rollouts"] * 1e6, 1)
        dispatcher.close()
    return {"workers": workers, "mix": mix, **found, "process_us": process_us}


def main(
    *,
    open: Annotated[Sequence[int], "requests of a round"] = (1000, 8192, 65536),
    workers: Annotated[Sequence[int], "of a fleet of fakes"] = (16, 64, 256, 1024),
    ray: Annotated[Sequence[int], "real workers"] = (16,),
    rollouts: Annotated[int, "that are timed, of each round"] = 60_000,
    profile: Annotated[bool, "print where the time goes in the last round of fakes, and write nothing"] = False,
    before: Annotated[Path | None, "record of an older tree, kept in this one's beside the new figures"] = None,
    out: Path = RESULTS / "driver.json",
) -> None:
    found: dict[str, Any] = {"rows": [], "fleet": [], "ray": []}

    def add(kind: str, row: dict[str, Any]) -> None:
        found[kind].append(row)
        print(row, flush=True)

    profiler = cProfile.Profile() if profile else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if ray and not profile:
            with ray_session(temp_dir=folder / "ray", cpus=max(ray)):
                for count in ray:
                    for mix in MIXES:
                        add("ray", with_ray(count, mix, rollouts // 10, folder))
        for requests in open:
            add("rows", by_open(requests, rollouts, folder))
        requests = 2 * max(workers, default=0) * SLOTS  # the same for all: with the most workers, as many wait as run
        for mix in MIXES:
            for count in workers:
                last = mix == "several" and count == workers[-1]
                add("fleet", by_workers(count, mix, requests, rollouts, folder, profiler if last else None))
    if profiler is not None:
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(25)
        return
    if before is not None:
        found["before"] = load(before)
    settings = {"slots": SLOTS, "samples": SAMPLES, "tokens": TOKENS, "seed": 0, "ray_period_s": PERIOD_S}
    question = "what does a finished rollout cost the driver, by open requests and by workers?"
    write(out, question, found, settings=settings | {"open_workers": OPEN_WORKERS})


if __name__ == "__main__":
    command(main)
