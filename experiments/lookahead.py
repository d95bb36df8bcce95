"""Correctness of early text by the age of its weights and by position: `python -m experiments.lookahead CONFIG`.

Owns `results/lookahead.json`. A run in one process. Before every RL step its requests are sampled with the present
weights and with those of 1, 2 and 3 updates before. The noise is the same, as with idle workers (`rollout.lookahead`).
Reported for each age: responses that are right as a whole, tokens before the first difference, the same for the longest
tenth, and how many of the responses longer than P tokens agree over the first P. Then the present engine checks the
text of the last update: engine steps with and without it. Counts and shares, no seconds, so a busy machine gives the
same. First run `paceline warmup CONFIG`, or the warm start adds minutes.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from benchmarks.harness import DEMO, ROOT, command, write
from contracts.rollout import Request, Rollout
from launch.config import Config, load_config
from launch.dispatch.early import EarlySampling
from launch.local.job import initial_weights, open_job, threads_of
from launch.local.record import RunRecord
from launch.run.job import Job
from launch.run.lookahead import Lookahead
from launch.run.rl_step import rl_step
from models.checkpoint import load_model
from models.manifest import WeightsManifest

AGES = (1, 2, 3)
POSITIONS = (16, 32, 64, 128, 256)
Snapshot = tuple[WeightsManifest, NDArray[np.uint8]]


@dataclass(slots=True)
class Standing:
    """Pairs of an early text and the response: first differences, and lengths of both."""

    first: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    whole: int = 0

    def add(self, early: NDArray[np.int32], real: NDArray[np.int32]) -> None:
        both = min(len(early), len(real))
        differ = np.flatnonzero(early[:both] != real[:both])
        self.first.append(int(differ[0]) if len(differ) else both)
        self.lengths.append(len(real))
        self.whole += not len(differ) and len(early) == len(real)

    def row(self) -> dict[str, Any]:
        first, lengths = np.array(self.first), np.array(self.lengths)
        longest = lengths >= np.quantile(lengths, 0.9)
        return {
            "responses": len(first),
            "mean_tokens": float(lengths.mean()),
            "whole": self.whole / len(first),
            "stood": float(first.sum() / lengths.sum()),
            "stood_of_longest_tenth": float(first[longest].sum() / lengths[longest].sum()),
            "agree_to": {
                str(at): float((first[lengths > at] >= at).mean()) for at in POSITIONS if (lengths > at).sum() >= 20
            },
        }


def replayed(config: Config, steps: int) -> Mapping[str, Any]:
    """Return the results of a run of `steps` RL steps."""
    initial = initial_weights(config)
    standing = {age: Standing() for age in AGES}
    counts = {"plain": 0, "checked": 0, "tokens": 0}
    with threads_of(config), open_job(config, cast(Any, RunRecord()), initial) as job:
        job.learner.begin(config.learner.optimizer, steps * config.learner.mini_batches)
        job.publish()
        engine = Counting(config, initial)
        snapshots = [snapshot(job)]
        for _ in range(steps):
            requests = coming(job)
            real, plain = engine.sample(snapshots[-1], requests)
            texts: dict[int, Rollout] = {}
            for age in AGES:
                if age < len(snapshots):
                    older, _ = engine.sample(snapshots[-1 - age], requests)
                    texts = texts or older
                    for request_id, rollout in real.items():
                        standing[age].add(older[request_id].tokens, rollout.tokens)
            if texts:
                early = [replace(request, early=texts[request.request_id].tokens) for request in requests]
                checked, passes = engine.sample(snapshots[-1], early)
                if any(not np.array_equal(checked[i].tokens, real[i].tokens) for i in real):
                    raise AssertionError("early text changed a token")
                counts["plain"] += plain
                counts["checked"] += passes
                counts["tokens"] += sum(len(rollout.tokens) for rollout in real.values())
            rl_step(job)
            snapshots = [*snapshots, snapshot(job)][-1 - max(AGES) :]
    found: dict[str, Any] = {f"{age}_updates": standing[age].row() for age in AGES if standing[age].first}
    return found | {"engine_steps": counts, "steps_saved": 1 - counts["checked"] / max(counts["plain"], 1)}


def snapshot(job: Job) -> Snapshot:
    """Return the learner's present weights."""
    manifest, buffer = job.learner.publish(job.steps_done)
    return manifest, np.array(buffer, np.uint8, copy=True)


def coming(job: Job) -> Sequence[Request]:
    """Return the requests of the next RL step, as a worker would get them."""
    early = EarlySampling()
    ahead = Lookahead(early=early, config=job.config, prompts=job.prompts, sampling=job.sampling, stop=job.stop)
    ahead.plan(job.order, job.lengths, 0)
    early.begin(())
    return early.give("worker", sys.maxsize, 1)


class Counting:
    """An engine that counts its steps."""

    def __init__(self, config: Config, initial: Path) -> None:
        self._steps: list[EngineStepRecord] = []
        self._engine = NativeEngine(load_model(initial), config.rollout.engine, steps=self._steps)

    def sample(self, weights: Snapshot, requests: Sequence[Request]) -> tuple[dict[int, Rollout], int]:
        """Return the responses under those weights, and the number of engine steps."""
        self._steps.clear()
        self._engine.update_weights(*weights)
        return self._engine.generate(requests), len(self._steps)


def main(
    config: Path = DEMO / "config.yaml",
    steps: int = 12,
    overrides: Annotated[Sequence[str], "of the configuration"] = (),
    out: Path = ROOT / "experiments/results/lookahead.json",
) -> None:
    """Print the table and write the record."""
    one_process = ["rollout.engine.threads=1", "learner.threads=1", "eval.every=0", f"run.steps={steps}"]
    loaded = load_config(config, [*one_process, *overrides]).config
    found = replayed(loaded, steps)
    lr = loaded.learner.optimizer.lr
    for name, row in found.items():
        print(f"lr {lr:g}, {name}: {row}")
    path = str(config.relative_to(ROOT)) if config.is_relative_to(ROOT) else config.name
    settings = {"config": path, "steps": steps, "overrides": list(overrides), "lr": lr}
    write(out, "How much early text stands, by age and position?", found, settings=settings)


if __name__ == "__main__":
    command(main, timed=False)
