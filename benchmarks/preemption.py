"""The time from the stop command to a worker decoding again: `python -m benchmarks.preemption`.

Owns `results/preemption.json`. One worker's engine and its spot trainer are both real child processes with one thread
each. A second engine decodes all the time, like the tail of another worker. Repeatedly, the trainer gets the worker,
trains, and is stopped at a random moment. Then the engine takes its memory back and gets a request, as in
`actors.spot_host`. `total` ends when that request's first token arrives here. The bound is one micro-step (the median)
plus 50 ms; `total_without_micro_step` excludes the interrupted micro-step. Neither Ray nor the coordinator is included,
since a worker that gets work stops training unasked.
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, TypeVar

import numpy as np

from actors.engine.process import RolloutEngine, spawn_engine
from actors.spot.process import SpotTrainer, spawn_trainer
from benchmarks.harness import RESULTS, command, quantiles_ms, write
from benchmarks.tools.drafting import random_record
from benchmarks.tools.targets import SIZES, fresh_model, random_prompts, requests_of
from config.drafter import DrafterOptions
from config.model import ModelOptions
from config.rollout import EngineOptions
from contracts.engine import Sleep, Submit, Wake
from contracts.records import SequenceRecord
from contracts.rollout import EngineIdle, Progress
from contracts.spot import (
    MicroStep,
    NeedData,
    StartTraining,
    StopTraining,
    TrainOn,
    TrainSession,
    TrainStopped,
)
from models.checkpoint import save_model
from models.config import ModelConfig

ALLOWED_S = 0.05  # in addition to one micro-step
DEADLINE_S = 30.0
PARTS = ("rest_of_micro_step", "stop", "wake_and_first_token", "total", "total_without_micro_step")
E = TypeVar("E")


def expect(poll: Callable[[float], list[Any]], kind: type[E], also: Callable[[Any], None] = lambda event: None) -> E:
    """Return the first event of a kind; `also` gets every event up to then."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        found = None
        for event in poll(0.05):
            also(event)
            if found is None and isinstance(event, kind):
                found = event
        if found is not None:
            return found
    raise TimeoutError(f"no {kind.__name__} within {DEADLINE_S:g} s")


def records_of(config: ModelConfig, tokens: int) -> list[SequenceRecord]:
    """Return records of a long-tailed length with about `tokens` tokens in total."""
    rng = np.random.default_rng(tokens)
    records, total = [], 0
    while total < tokens:
        records.append(random_record(int(rng.integers(40, 240)), config, seed=tokens))
        total += records[-1].rows
    return records


class Worker:
    """Engine and trainer of one rollout worker."""

    def __init__(self, engine: RolloutEngine, trainer: SpotTrainer, config: ModelConfig) -> None:
        self.engine, self.trainer = engine, trainer
        self._config = config
        self._sessions = 0
        self.micro_steps: list[float] = []
        self._ends: list[float] = []

    def train(self, seconds: float) -> None:
        """Run a session for `seconds` from its first micro-step on."""
        self.engine.send(Sleep())
        self._sessions += 1
        self.trainer.send(StartTraining(TrainSession(self._sessions, self._sessions, ("worker",), 0)))
        expect(self.trainer.poll, MicroStep, self._hear)
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            for event in self.trainer.poll(left_s):
                self._hear(event)

    def preempt(self) -> tuple[float, ...]:
        """Preempt the trainer. Returns the seconds of PARTS."""
        known, at_s, start_s = len(self.micro_steps), time.time(), perf_counter()
        self.trainer.send(StopTraining(time.time()))
        expect(self.trainer.poll, TrainStopped, self._hear)
        stopped_s = perf_counter()
        rest_s = max([0.0, *(end_s - at_s for end_s in self._ends[known:])])
        self.engine.send(Wake())
        self.engine.send(Submit(tuple(requests_of([np.arange(24)], [8], seed=self._sessions))))
        tokens_s: list[float] = []
        expect(self.engine.poll, EngineIdle, lambda e: tokens_s.append(perf_counter()) if type(e) is Progress else None)
        end_s = tokens_s[0]
        return rest_s, stopped_s - start_s, end_s - stopped_s, end_s - start_s, end_s - start_s - rest_s

    def _hear(self, event: Any) -> None:
        if isinstance(event, MicroStep):
            self.micro_steps.append(event.seconds)
            self._ends.append(event.started_s + event.seconds)
        elif isinstance(event, NeedData):
            self.trainer.send(TrainOn(tuple(records_of(self._config, event.tokens))))


class Neighbour:
    """An engine that decodes `running` requests until it is closed."""

    def __init__(self, engine: RolloutEngine, running: int) -> None:
        self._engine, self._running = engine, running
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._closing.is_set():
            prompts = random_prompts(self._running, seed=number)
            requests = requests_of(prompts, [400] * self._running, first=number * self._running)
            self._engine.send(Submit(tuple(requests)))
            expect(self._engine.poll, EngineIdle)
            number += 1

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._engine.close()


def summary(taken: np.ndarray[Any, Any], micro_steps: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return milliseconds of `taken` [preemptions, PARTS] and of micro-steps [M]; pure."""

    bound_s = float(np.median(micro_steps)) + ALLOWED_S
    return {
        "preemptions": len(taken),
        "micro_steps": len(micro_steps),
        "micro_step_ms": quantiles_ms(micro_steps),
        **{f"{part}_ms": quantiles_ms(taken[:, i]) for i, part in enumerate(PARTS)},
        "bound_ms": round(bound_s * 1e3, 2),
        "kept": bool(np.quantile(taken[:, PARTS.index("total")], 0.99) < bound_s),
    }


def main(
    *,
    target: Annotated[str, "its shape; the weights are fresh", SIZES] = "demo",
    preemptions: int = 200,
    micro_step_tokens: Annotated[int, "as in the demo"] = 512,
    running: Annotated[int, "requests that the other worker decodes; 0: no other"] = 4,
    out: Path = RESULTS / "preemption.json",
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = fresh_model(target)
        save_model(model, Path(directory) / "target")
        options = ModelOptions(path=str(Path(directory) / "target"))
        engine = spawn_engine(options, EngineOptions(threads=1, progress_every_tokens=1), name="engine")
        trainer = spawn_trainer(
            DrafterOptions(micro_step_tokens=micro_step_tokens, checkpoint_every=10),
            options,
            checkpoint_dir=Path(directory) / "drafter",
            threads=1,
            device="cpu",
        )
        other = Neighbour(spawn_engine(options, EngineOptions(threads=1)), running) if running else None
        worker = Worker(engine, trainer, model.config)
        rng = np.random.default_rng(0)
        taken = []
        try:
            for number in range(preemptions):
                worker.train(float(rng.uniform(0.0, 0.4)))
                taken.append(worker.preempt())
                if number % 20 == 19:
                    print(f"{number + 1} preemptions", flush=True)
        finally:
            if other is not None:
                other.close()
            trainer.close()
            engine.close()
    found = summary(np.array(taken), np.array(worker.micro_steps))
    print(json.dumps(found, indent=1))
    settings = {"target": target, "micro_step_tokens": micro_step_tokens, "running": running, "seed": 0}
    write(out, "how soon does a worker decode again after its trainer was told to stop?", found, settings=settings)


if __name__ == "__main__":
    command(main)
