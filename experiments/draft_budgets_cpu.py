"""What budgets by length are worth on this machine's engine: `python -m experiments.draft_budgets_cpu`.

The demo's prompts in groups of 8 at temperature 1, drafters know an earlier epoch. Two engines with the adaptive
choice, one of them with `budget: length_aware`, decode the same waves in turns; every run must draw the tokens of the
first. A ratio is adaptive's time over the time with budgets, of runs that followed each other; the median is reported.
The steps of all runs say how well eq. (1) of DAS, a line through the rows of a pass, predicts the time of a run whose
steps it was not fitted to. Owns `results/draft_budgets_cpu.json`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch

from actors.engine.batch.telemetry import EngineStepRecord
from benchmarks.harness import ROOT, command, interval, markdown, write
from benchmarks.tools.contenders import adaptive
from benchmarks.tools.rollouts import (
    MEASURED_EPOCH,
    WARMUP_EPOCH,
    History,
    Run,
    decode,
    engine_options,
    record_history,
    require_same,
    waves,
)
from benchmarks.tools.targets import SIZES, Target, Task, find_demo, load_target, load_task
from config.speculation import SpeculationOptions
from experiments.draft_budgets import figure_8, line
from policies.speculation.build import build_budget

AWARE = SpeculationOptions(budget="length_aware")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    target: Annotated[Path | None, "the demo's model directory; default: the newest in runs/"] = None
    sizes: Annotated[Sequence[str], "of the target", SIZES] = ("demo", "20m")
    batches: Annotated[Sequence[int], "requests submitted together"] = (8, 16, 32, 64)
    repeats: Annotated[int, "pairs of runs"] = 7
    learning_runs: Annotated[int, "of each engine, not counted"] = 4
    seconds: Annotated[float, "of a plain run, at least"] = 0.5
    threads: int = 2
    out: Path = ROOT / "experiments/results/draft_budgets_cpu.json"


def measure(target: Target, task: Task, history: History, batch: int, options: Options) -> dict[str, Any]:
    """A row of the record."""
    once = decode(target, waves(task, 1, batch, WARMUP_EPOCH))
    count = max(1, min(round(options.seconds / once.seconds), len(task.prompts)))
    contender = adaptive(target)
    policies = {"adaptive": contender.policy(), "length-aware": contender.policy()}

    def run(name: str, epoch: int) -> Run:
        policy = policies[name]
        return decode(
            target,
            waves(task, count, batch, epoch),
            policy=policy,
            drafters=contender.drafters(engine_options(batch)),
            budget=build_budget(AWARE, policy, batch) if name == "length-aware" else None,
            history=history,
        )

    for _ in range(options.learning_runs):
        for name in policies:
            run(name, WARMUP_EPOCH)
    reference = decode(target, waves(task, count, batch, MEASURED_EPOCH))
    ratios, runs, drafted = [], [reference], dict.fromkeys(policies, 0)
    for turn in range(options.repeats):
        pair = {}
        for name in list(policies) if turn % 2 else list(policies)[::-1]:
            pair[name] = run(name, MEASURED_EPOCH)
            require_same(reference, pair[name], f"{name} at {batch} requests")
            drafted[name] += sum(step.drafted for step in pair[name].steps)
        ratios.append(pair["adaptive"].seconds / pair["length-aware"].seconds)
        runs += pair.values()
    return {
        "target": target.size,
        "requests": batch,
        "waves": count,
        "tokens": reference.tokens,
        "adaptive_over_length_aware": interval(ratios),
        "drafted": drafted,
        "linear": linear(runs),
    }


def linear(runs: Sequence[Run]) -> dict[str, Any]:
    """Eq. (1): of single steps, and of whole runs by the steps of the others."""
    steps = [[step for step in run.steps if not step.prefill_tokens] for run in runs]
    errors = []
    for held_out, mine in enumerate(steps):
        base, row = line(*_passes([step for at, other in enumerate(steps) if at != held_out for step in other]))
        rows, seconds = _passes(mine)
        errors.append(abs(float((base + row * rows).sum() / seconds.sum()) - 1))
    return figure_8(*_passes([step for of in steps for step in of])) | {"run_error": round(fmean(errors), 4)}


def _passes(steps: Sequence[EngineStepRecord]) -> tuple[np.ndarray, np.ndarray]:
    """(rows, seconds without drafting)."""
    rows = np.array([step.running + step.drafted for step in steps], np.float64)
    return rows, np.array([step.elapsed_s - step.draft_s for step in steps])


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    demo = find_demo(options.target)
    task = load_task(demo)
    history = record_history(load_target(demo, "demo", "float32"), task)
    rows = []
    for size in options.sizes:
        target = load_target(demo, size, "float32")
        for batch in options.batches:
            rows.append(measure(target, task, history, batch, options))
            print(rows[-1], flush=True)
    cells = [
        [f"{row['target']}, {row['requests']}", row["adaptive_over_length_aware"]["median"], row["linear"]["ratio"]]
        for row in rows
    ]
    print(markdown(["target, requests", "adaptive / length-aware", "base / row"], cells))
    question = "on this machine: time with the adaptive choice over time with budgets by length as well"
    settings = {"threads": options.threads, "repeats": options.repeats, "learning_runs": options.learning_runs}
    write(options.out, question, {"rows": rows}, settings=settings)


if __name__ == "__main__":
    main(command(Options))
