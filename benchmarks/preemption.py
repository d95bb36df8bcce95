"""From the stop command to a worker decoding again: `python -m benchmarks.preemption`.

Owns `results/preemption.json`. One worker's engine and its spot trainer, both real child processes on one thread each,
and a second engine that decodes all the time, as the tail of another worker does. Again and again the trainer gets the
worker, trains, and is stopped at a random moment; then the engine takes its memory back and is given a request, as
`actors.spot_host` does it. `total` ends when that request's first token arrives here. The bound is one micro-step (the
median) and 50 ms; `total_without_micro_step` is what remains beside the micro-step that it met. Neither Ray nor the
coordinator is in it: a worker that is given work stops training unasked.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch

from actors.engine.commands import Sleep, Submit, Wake
from actors.engine.core import RolloutEngine
from actors.engine.options import EngineOptions
from actors.engine.process import spawn_engine
from actors.engine.types import EngineIdle, Progress, Request, SamplingParams
from actors.spot.process import spawn_trainer
from actors.spot.types import MicroStep, NeedData, SpotTrainer, TrainSession, TrainStopped
from benchmarks.machine import describe_machine
from benchmarks.recording import build
from drafter.training.records import SequenceRecord
from models.checkpoint import save_model
from models.options import ModelOptions
from policies.drafter.options import DrafterOptions

ROOT = Path(__file__).resolve().parents[1]
ALLOWED_S = 0.05  # beside one micro-step
DEADLINE_S = 30.0
PARTS = ("rest_of_micro_step", "stop", "wake_and_first_token", "total", "total_without_micro_step")
E = TypeVar("E")


def expect(poll: Callable[[float], list[Any]], kind: type[E], also: Callable[[Any], None] = lambda event: None) -> E:
    """The first event of a kind; `also` hears of every event up to then."""
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


def records_of(width: int, vocab: int, tokens: int) -> list[SequenceRecord]:
    """Of a long-tailed length together about `tokens` tokens; random states, which change no time."""
    rng = np.random.default_rng(tokens)
    records, total = [], 0
    while total < tokens:
        rows = int(rng.integers(40, 240))
        states = rng.standard_normal((rows, width)).astype(np.float32).view(np.uint8)
        drawn = rng.integers(0, vocab, rows + 1).astype(np.int32)
        records.append(
            SequenceRecord(
                tokens=drawn, prompt_length=20, first=0, states=states, dtype="float32", width=width, target_version=0
            )
        )
        total += rows
    return records


class Worker:
    """Engine and trainer of one rollout worker."""

    def __init__(self, engine: RolloutEngine, trainer: SpotTrainer, width: int, vocab: int) -> None:
        self.engine, self.trainer = engine, trainer
        self._width, self._vocab = width, vocab
        self._sessions = 0
        self.micro_steps: list[float] = []
        self._ends: list[float] = []

    def train(self, seconds: float) -> None:
        """A session, from its first micro-step on for so long."""
        self.engine.send(Sleep())
        self._sessions += 1
        self.trainer.start(TrainSession(self._sessions, self._sessions, ("worker",), 0))
        expect(self.trainer.poll, MicroStep, self._hear)
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            for event in self.trainer.poll(left_s):
                self._hear(event)

    def preempt(self) -> tuple[float, ...]:
        """Seconds of PARTS."""
        known, at_s, start_s = len(self.micro_steps), time.time(), perf_counter()
        self.trainer.stop()
        expect(self.trainer.poll, TrainStopped, self._hear)
        stopped_s = perf_counter()
        rest_s = max([0.0, *(end_s - at_s for end_s in self._ends[known:])])
        self.engine.send(Wake())
        prompt = np.arange(24, dtype=np.int32)
        request = Request(
            request_id=0,
            prompt_id=0,
            prompt_tokens=prompt,
            noise_key=self._sessions,
            sampling=SamplingParams(8),
        )
        self.engine.send(Submit((request,)))
        tokens_s: list[float] = []
        expect(self.engine.poll, EngineIdle, lambda e: tokens_s.append(perf_counter()) if type(e) is Progress else None)
        end_s = tokens_s[0]
        return rest_s, stopped_s - start_s, end_s - stopped_s, end_s - start_s, end_s - start_s - rest_s

    def _hear(self, event: Any) -> None:
        if isinstance(event, MicroStep):
            self.micro_steps.append(event.seconds)
            self._ends.append(event.started_s + event.seconds)
        elif isinstance(event, NeedData):
            self.trainer.feed(records_of(self._width, self._vocab, event.tokens))


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
            prompts = np.random.default_rng(number).integers(0, 200, (self._running, 24)).astype(np.int32)
            first = number * self._running
            requests = [
                Request(
                    request_id=first + i,
                    prompt_id=i,
                    prompt_tokens=prompts[i],
                    noise_key=first + i,
                    sampling=SamplingParams(400),
                )
                for i in range(self._running)
            ]
            self._engine.send(Submit(tuple(requests)))
            expect(self._engine.poll, EngineIdle)
            number += 1

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo", choices=["demo", "20m"], help="its shape; the weights are fresh")
    parser.add_argument("--preemptions", type=int, default=200)
    parser.add_argument("--micro-step-tokens", type=int, default=512, help="as in the demo")
    parser.add_argument("--running", type=int, default=4, help="requests that the other worker decodes; 0: no other")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "preemption.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = build(options.target, torch.float32)
        save_model(model, Path(directory) / "target")
        config = model.config
        target = ModelOptions(path=str(Path(directory) / "target"))
        engine_options = EngineOptions(threads=1, progress_every_tokens=1)
        engine = spawn_engine(target, engine_options, name="engine")
        trainer = spawn_trainer(
            DrafterOptions(micro_step_tokens=options.micro_step_tokens, checkpoint_every=10),
            target,
            checkpoint_dir=Path(directory) / "drafter",
            threads=1,
            device="cpu",
        )
        other = Neighbour(spawn_engine(target, EngineOptions(threads=1)), options.running) if options.running else None
        worker = Worker(engine, trainer, config.hidden_size, config.vocab_size)
        rng = np.random.default_rng(0)
        taken = []
        try:
            for number in range(options.preemptions):
                worker.train(float(rng.uniform(0.0, 0.4)))
                taken.append(worker.preempt())
                if number % 20 == 19:
                    print(f"{number + 1} preemptions", flush=True)
        finally:
            if other is not None:
                other.close()
            trainer.close()
            engine.close()
    record = summary(np.array(taken), np.array(worker.micro_steps))
    record |= {"target": options.target, "micro_step_tokens": options.micro_step_tokens, "running": options.running}
    print(json.dumps(record, indent=1))
    Path(options.out).write_text(
        json.dumps({"machine": describe_machine()} | record, indent=1) + "\n", encoding="utf-8"
    )


def summary(taken: np.ndarray[Any, Any], micro_steps: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Milliseconds of `taken` [preemptions, PARTS] and of micro-steps [M]; pure."""

    def quantiles(seconds: np.ndarray[Any, Any]) -> dict[str, float]:
        points = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        return {name: round(float(np.quantile(seconds, q)) * 1e3, 2) for name, q in points.items()}

    bound_s = float(np.median(micro_steps)) + ALLOWED_S
    return {
        "preemptions": len(taken),
        "micro_steps": len(micro_steps),
        "micro_step_ms": quantiles(micro_steps),
        **{f"{part}_ms": quantiles(taken[:, i]) for i, part in enumerate(PARTS)},
        "bound_ms": round(bound_s * 1e3, 2),
        "kept": bool(np.quantile(taken[:, PARTS.index("total")], 0.99) < bound_s),
    }


if __name__ == "__main__":
    main()
