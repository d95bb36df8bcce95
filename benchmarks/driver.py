"""What a finished rollout costs the driver, by open requests. Answers: does one driver carry a large fleet?

The dispatcher, its ledger, the collector and the observer are the real ones; workers, reward workers and Ray are
replaced by fakes that answer at once. Every batch of events brings the worst case, one finished rollout with the
progress of four others, so each is followed by an assignment. Detokenising is included, the fakes' own time is not.

    python -m benchmarks.driver [--open 1000 8192 65536] [--rollouts 60000] [--profile] [--before FILE] [--out FILE]
"""

import cProfile
import pstats
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, cast

import numpy as np
import ray

from actors.data import Prompt
from actors.engine.commands import Abort, Command, Submit
from actors.engine.options import EngineOptions, RolloutOptions
from actors.engine.types import (
    EngineWindow,
    Finished,
    FinishReason,
    Progress,
    Rollout,
    Sampled,
    SamplingParams,
)
from actors.reward_worker import RewardPool
from actors.rewards import Grade, GradeItem
from benchmarks.harness import RESULTS, command, load, write
from examples.guess_and_check.make_data import build_tokenizer
from launch.batch import Batch, Pick
from launch.config import Config
from launch.dispatch import RolloutDispatcher
from launch.interrupt import Interrupt
from launch.observe import Observer
from launch.run.collect import Collector

WORKERS, SLOTS, SAMPLES, TOKENS = 8, 64, 8, 128
WINDOWS = 8  # of rollouts, of which the slowest and the median are told


class Enough(BaseException):
    """The rollouts that are timed have come."""


class Own:
    """How long the fakes themselves took."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._since_s = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        self.seconds += time.perf_counter() - self._since_s


OWN = Own()


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


@dataclass(eq=False)
class Ref:
    value: Any = None


@dataclass(eq=False)
class Worker:
    """Handle and stream of a worker whose oldest request ends with every batch of events."""

    running: deque[int] = field(default_factory=deque)
    aborted: list[int] = field(default_factory=list)
    batches: int = 0

    def __getattr__(self, method: str) -> Any:
        """handle.method.remote(...)"""
        if method == "stream":
            return _Remote(lambda: self)
        return _Remote(self._tell if method == "tell" else lambda *_: Ref("up"))

    def _tell(self, command: Command, memory: None) -> Ref:
        with OWN:
            match command:
                case Submit(requests):
                    self.running.extend(request.request_id for request in requests)
                case Abort(request_ids):
                    self.aborted.extend(request_ids)
            return Ref()

    def __next__(self) -> Ref:
        with OWN:
            if self.aborted:
                events = [Finished(rollout(i, FinishReason.ABORT)) for i in self.aborted]
                self.aborted.clear()
                self.running.clear()
                return Ref(events)
            self.batches += 1
            first = self.running.popleft()
            said: list[Any] = [Progress(i, DELTA) for i in list(self.running)[:4]] if self.running else []
            said.append(Finished(rollout(first, FinishReason.STOP)))
            return Ref([*said, WINDOW] if self.batches % 20 == 0 else said)


class _Remote:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


def rollout(request_id: int, reason: FinishReason) -> Rollout:
    return Rollout(
        request_id=request_id, sampled=WHOLE, finish_reason=reason, weights_version=0, started_s=0.0, finished_s=0.0
    )


def prompt(prompt_id: int) -> Prompt:
    tokens = np.arange(8, dtype=np.int32)
    return Prompt(prompt_id=prompt_id, uid=str(prompt_id), text="p", tokens=tokens, record={}, where="here")


class Pool:
    """The reward pool: grades at once."""

    def __init__(self) -> None:
        self._grades: dict[int, Grade] = {}

    def begin(self, *, same_step: bool) -> None:
        self._grades = {}

    def submit(self, key: int, item: GradeItem) -> None:
        self._grades[key] = Grade(value=0.0)

    def poll(self) -> None: ...

    def drain(self) -> dict[int, Grade]:
        return self._grades


class FakeRay:
    """`ray.wait` and `ray.get` over what answers at once. One stream at a time brings events, in turns."""

    def __init__(self, rollouts: int, profile: cProfile.Profile | None) -> None:
        self._turn, self._rollouts, self._profile = 0, rollouts, profile
        self._ready: list[Any] = []
        self.times_s, self.own_s = deque[float](), deque[float]()

    def wait(self, refs: Sequence[Any], *, num_returns: int = 1, timeout: float | None = None) -> Any:
        with OWN:
            if num_returns > 1:  # what else is there?
                return self._ready, []
            self._turn += 1
            streams = [ref for ref in refs if type(ref) is Worker and (ref.running or ref.aborted)]
            self._ready = [ref for ref in refs if type(ref) is Ref]
            self._ready += [streams[self._turn % len(streams)]] if streams else []
            return self._ready, []

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        return ref.value

    def finished(self) -> None:
        self.times_s.append(time.perf_counter())
        self.own_s.append(OWN.seconds)
        if self._profile is not None and len(self.times_s) == 1:
            self._profile.enable()
        if len(self.times_s) > self._rollouts:
            raise Enough


def measure(
    open_requests: int, rollouts: int, folder: Path, profile: cProfile.Profile | None = None
) -> dict[str, float]:
    """One round of so many requests, of which the first `rollouts` are timed."""
    fake = FakeRay(min(rollouts, open_requests - 1), profile)
    instead: Any = ray
    instead.wait, instead.get, instead.kill = fake.wait, fake.get, lambda *args, **kwargs: None
    observe = {"live": False, "tensorboard": False}
    config = Config.model_validate(
        {"run": {"name": "driver", "steps": 1}, "model": {"path": "m"}, "data": {"train": "t"}, "observe": observe}
    )
    options = RolloutOptions(workers=WORKERS, engine=EngineOptions(max_running=SLOTS))
    with Observer(folder / str(open_requests), config) as observer:
        dispatcher = RolloutDispatcher(lambda name: cast(Any, Worker()), options, on_event=observer.event)
        dispatcher.start()
        rng = np.random.default_rng(0)
        prompts = open_requests // SAMPLES
        picks = [Pick(0, prompt(i)) for i in range(prompts)]
        batch = Batch(
            picks,
            [SAMPLES] * prompts,
            SamplingParams(TOKENS),
            seed=0,
            expected_tokens=list(rng.uniform(8, TOKENS, prompts)),
        )
        progress = observer.progress

        def told(*args: Any) -> None:
            progress(*args)
            fake.finished()

        cast(Any, observer).progress = told
        collector = Collector(dispatcher, cast(RewardPool, Pool()), build_tokenizer(), observer, Interrupt())
        start_s = time.perf_counter()
        with suppress(Enough):
            collector.run(batch, "rollout")
        if profile is not None:
            profile.disable()
        dispatcher.close()
    times, own_s = np.array(fake.times_s), fake.own_s[-1] - fake.own_s[0]
    windows = [float(w[-1] - w[0]) / (len(w) - 1) * 1e6 for w in np.array_split(times, WINDOWS)]
    return {
        "open": open_requests,
        "rollouts": len(times),
        "us_per_rollout": round(float(times[-1] - times[0] - own_s) / (len(times) - 1) * 1e6, 1),
        "median_us": round(median(windows), 1),
        "slowest_window_us": round(max(windows), 1),
        "until_first_ms": round(float(times[0] - start_s) * 1e3, 1),
    }


def main(
    *,
    open: Annotated[Sequence[int], "requests of a round"] = (1000, 8192, 65536),
    rollouts: Annotated[int, "that are timed, of each round"] = 60_000,
    profile: Annotated[bool, "print where the time goes in the last round, and write nothing"] = False,
    before: Annotated[Path | None, "record of an older tree, kept in this one's beside the new figures"] = None,
    out: Path = RESULTS / "driver.json",
) -> None:
    profiler = cProfile.Profile() if profile else None
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        measure(open[0], 200, Path(folder) / "warm-up")
        for requests in open:
            rows.append(measure(requests, rollouts, Path(folder), profiler if requests == open[-1] else None))
            print(rows[-1], flush=True)
    if profiler is not None:
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(25)
        return
    found: dict[str, Any] = {"rows": rows}
    if before is not None:
        found["before"] = load(before)
    settings = {"workers": WORKERS, "slots": SLOTS, "samples": SAMPLES, "tokens": TOKENS, "seed": 0}
    write(out, "what does a finished rollout cost the driver, by open requests?", found, settings=settings)


if __name__ == "__main__":
    command(main)
