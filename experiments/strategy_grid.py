"""Accept length and speed-up over depth, top-k, tokens to verify and batch size, and what the chooser makes of them.

    python -m experiments.strategy_grid [--sizes 20m] [--dtypes float32] [--drafters suffix] [--eagle 20m=DIR]

Owns `results/strategy_grid.json` and `strategy_grid.md`: the tables beside TLT's Tables 1 and 4 and Figure 13. Requests
are those of `benchmarks.rollout`, but the running batch is kept full: as one ends the next takes its place, and only
steps with exactly that many running requests count. A cell's speed-up is over plain decoding at the same batch size,
measured between the cells. Row "all" has the arms that a run has by default, of every drafter.

The chooser then decodes with all cells of its batch size as arms, plain decoding among them, in turns with what came
out best: its `--finalists` fastest cells and plain decoding, so that the best fixed strategy is known in hindsight from
runs beside the chooser's, and not from the luckiest of many before. Its *regret* is the share of its time that the
fastest of them would have saved for the same tokens: everything counts, trials and decisions included. A fresh chooser
with the engine's calibration begins; its first run (a second or so) is told apart, `first_regret`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch

from benchmarks.harness import ROOT, command, interval, load, write
from benchmarks.tools import rollouts
from benchmarks.tools.calibrated import calibrate
from benchmarks.tools.contenders import Contender, adaptive, fixed
from benchmarks.tools.rollouts import (
    MEASURED_EPOCH,
    WARMUP_EPOCH,
    History,
    Run,
    Speed,
    decode,
    engine_options,
    waves,
)
from benchmarks.tools.targets import DTYPES, SIZES, Target, Task, find_demo, load_target, load_task
from config.catalogue import at_hand
from config.speculation import SpeculationOptions
from config.strategy import PLAIN, Strategy
from experiments.grid_report import tables
from policies.calibration.document import Calibration
from policies.speculation.defaults import default_arms

SELF_DEPTHS = (3, 5, 7, 10)
ALL = "all"  # of the drafters that a run has by default
DEPTHS = (2, 4, 8, 12)
VERIFY = (2, 4, 8, 16, 24)  # Figure 13, with TOP_K
TOP_KS = (1, 2, 4, 8)  # Table 1, with depth 8 and 16 tokens to verify
TOP_K, TABLE_1_DEPTH, TABLE_1_VERIFY = 4, 8, 16
TABLE_4_DEPTH, TABLE_4_VERIFY = 8, (2, 4, 8, 16)  # Table 4, with TOP_K; depth at most the tokens to verify
BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    target: Annotated[Path | None, "the demo's model directory; default: the newest in runs/"] = None
    sizes: Annotated[Sequence[str], "of the target", SIZES] = ("20m",)
    dtypes: Annotated[Sequence[str], "of the target", DTYPES] = ("float32",)
    batches: Sequence[int] = BATCHES
    drafters: Sequence[str] = ("suffix", "ngram", "self", ALL, "eagle")
    eagle: Annotated[Sequence[str], "SIZE=DIR: drafter weights of a size"] = ()
    repeats: int = 2
    chooser_runs: Annotated[int, "of the chooser and of the finalists, behind its first"] = 5
    finalists: int = 2
    seconds: Annotated[float, "of a plain run"] = 1.0
    calibration_seconds: Annotated[float, "of every target"] = 10.0
    threads: int = 2
    out: Path = ROOT / "experiments/results/strategy_grid.json"


def strategy(drafter: str, depth: int, top_k: int, verify: int) -> Strategy:
    """The strategy with these parameters; a chain verifies its depth, and no path is deeper than what is verified."""
    depth = min(depth, verify)
    return Strategy(drafter, depth) if top_k == 1 else Strategy(drafter, depth, top_k, verify)


def cells(drafter: str, batch: int) -> list[Strategy]:
    """The grid of a batch size: depth x tokens to verify, and top-k, at batch 1; tokens to verify elsewhere."""
    if drafter == ALL:
        return list(default_arms(at_hand(SpeculationOptions(), cache_lent=True)))
    if drafter == "self":
        return [Strategy(drafter, depth) for depth in SELF_DEPTHS]
    found: dict[Strategy, None] = {}
    for verify in TABLE_4_VERIFY:
        found[strategy(drafter, TABLE_4_DEPTH, TOP_K, verify)] = None
        found[strategy(drafter, TABLE_4_DEPTH, 1, verify)] = None
    if batch == 1:
        for depth in DEPTHS:
            for verify in VERIFY:
                if verify >= depth:
                    found[strategy(drafter, depth, TOP_K, verify)] = None
        for top_k in TOP_KS:
            found[strategy(drafter, TABLE_1_DEPTH, top_k, TABLE_1_VERIFY)] = None
        for depth in DEPTHS:
            found[strategy(drafter, depth, 1, depth)] = None
    return list(found)


class Bench:
    """One target at one batch size."""

    def __init__(
        self, target: Target, task: Task, history: History, batch: int, seconds: float, calibration: Calibration
    ) -> None:
        self.target, self.history, self.batch, self._task = target, history, batch, task
        self.calibration = calibration
        self.engine = engine_options(batch)
        requests = 4 * batch
        once = self._decode(requests, WARMUP_EPOCH)
        count = min(max(round(seconds / once.seconds * requests), requests), rollouts.GROUP * len(task.prompts))
        self.requests = -(-count // batch) * batch
        self.reference = self._decode(self.requests, MEASURED_EPOCH)

    def _decode(self, requests: int, epoch: int, **how: Any) -> Run:
        together = [
            request for wave in waves(self._task, requests // self.batch, self.batch, epoch) for request in wave
        ]
        return decode(self.target, [together], running=self.batch, **how)

    def speed(self, contender: Contender | None = None, epoch: int = MEASURED_EPOCH) -> Speed:
        """At the full batch; None: plain decoding."""
        return rollouts.speed_of(self.run(contender, epoch).steps, running=self.batch)

    def run(self, contender: Contender | None, epoch: int = MEASURED_EPOCH) -> Run:
        how: dict[str, Any] = {}
        if contender is not None:
            how = {
                "policy": contender.policy(),
                "drafters": contender.drafters(self.engine),
                "history": self.history,
            }
        run = self._decode(self.requests, epoch, **how)
        if epoch == MEASURED_EPOCH:
            rollouts.require_same(self.reference, run, "off" if contender is None else contender.name)
        return run


def measure_cells(
    bench: Bench, strategies: Sequence[Strategy], eagle: str | None, repeats: int
) -> list[dict[str, Any]]:
    """Every cell `repeats` times, plain decoding before and after each round."""
    speedups: dict[Strategy, list[float]] = {cell: [] for cell in strategies}
    accepted: dict[Strategy, float] = {}
    for _ in range(repeats):
        plain = [bench.speed().token_s]
        found = {}
        for number, cell in enumerate(strategies):
            speed = bench.speed(fixed(bench.target, str(cell), eagle))
            found[cell], accepted[cell] = speed.token_s, speed.accept_length
            if number % 6 == 5:
                plain.append(bench.speed().token_s)
        plain.append(bench.speed().token_s)
        for cell, token_s in found.items():
            speedups[cell].append(fmean(plain) / token_s)
    return [
        {
            "strategy": str(cell),
            "depth": cell.depth,
            "top_k": cell.top_k,
            "tokens_to_verify": cell.tokens_to_verify,
            "accept_length": round(accepted[cell], 2),
            "speedup": round(fmean(speedups[cell]), 3),
        }
        for cell in strategies
    ]


def measure_choice(bench: Bench, row: Sequence[dict[str, Any]], eagle: str | None, options: Options) -> dict[str, Any]:
    """What the default policy makes of the cells, in turns with the best of them. See the module docstring."""
    ranked = sorted(row, key=lambda cell: -cell["speedup"])
    names = [cell["strategy"] for cell in row]
    chooser = adaptive(
        bench.target, calibration=bench.calibration, eagle=eagle, strategies=names, max_running=bench.batch
    )
    policy = chooser.policy()
    kept = Contender("chooser", lambda: policy, chooser.drafters)
    others: dict[str, Contender | None] = {str(PLAIN): None}
    others |= {cell["strategy"]: fixed(bench.target, cell["strategy"], eagle) for cell in ranked[: options.finalists]}
    first = bench.speed(kept, WARMUP_EPOCH)
    best_first = min((bench.speed(other, WARMUP_EPOCH) for other in others.values()), key=lambda speed: speed.token_s)
    ours: list[Run] = []
    theirs: dict[str, list[Speed]] = {name: [] for name in others}
    for _ in range(options.chooser_runs):
        ours.append(bench.run(kept))
        for name, other in others.items():
            theirs[name].append(bench.speed(other))
    seconds = {name: [speed.token_s for speed in speeds] for name, speeds in theirs.items()}
    best = min(seconds, key=lambda name: fmean(seconds[name]))
    reached = [rollouts.speed_of(run.steps, running=bench.batch).token_s for run in ours]
    full = [step for run in ours for step in run.steps if step.running == bench.batch and not step.prefill_tokens]
    used = Counter(str(step.strategy) for step in full)
    return {
        "best": best,
        "best_speedup": round(fmean(seconds[str(PLAIN)]) / fmean(seconds[best]), 3),
        "chosen": {name: round(count / len(full), 3) for name, count in used.most_common(4)},
        "reached_speedup": round(fmean(seconds[str(PLAIN)]) / fmean(reached), 3),
        "regret": round(1 - fmean(seconds[best]) / fmean(reached), 3),
        "regrets": interval([1 - of / own for of, own in zip(seconds[best], reached, strict=True)]),
        "first_regret": round(1 - best_first.token_s / first.token_s, 3),
    }


def grid_of(target: Target, task: Task, history: History, options: Options) -> Iterator[dict[str, Any]]:
    eagle = dict(pair.split("=", 1) for pair in options.eagle).get(target.size)
    drafters = [name for name in options.drafters if name != "eagle" or eagle is not None]
    calibration = calibrate(target, max(options.batches), options.calibration_seconds)
    for batch in options.batches:
        bench = Bench(target, task, history, batch, options.seconds, calibration)
        for drafter in drafters:
            row = measure_cells(bench, cells(drafter, batch), eagle, options.repeats)
            choice = measure_choice(bench, row, eagle, options)
            print(
                f"{target.name} batch {batch} {drafter}: best {choice['best']} {choice['best_speedup']:.2f}x, reached "
                f"{choice['reached_speedup']:.2f}x, regret {choice['regret']:.1%} (first run "
                f"{choice['first_regret']:.1%}), chosen {choice['chosen']}",
                flush=True,
            )
            yield {
                "target": target.size,
                "dtype": target.dtype,
                "batch": batch,
                "drafter": drafter,
                "requests": bench.requests,
                "cells": row,
                "choice": choice,
            }


def _asked(row: dict[str, Any], options: Options) -> bool:
    asked = (options.sizes, options.dtypes, options.batches, options.drafters)
    return all(row[name] in of for name, of in zip(("target", "dtype", "batch", "drafter"), asked, strict=True))


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    demo = find_demo(options.target)
    task = load_task(demo)
    settings = {"repeats": options.repeats, "chooser_runs": options.chooser_runs, "seconds": options.seconds}
    settings |= {"threads": options.threads, "temperature": 1.0, "seed": rollouts.SEED}
    rows: list[dict[str, Any]] = []
    if options.out.is_file():  # cells of this machine that are not measured now
        rows = [row for row in load(options.out)["rows"] if not _asked(row, options)]
    for dtype in options.dtypes:
        history = rollouts.record_history(load_target(demo, "demo", dtype), task)
        for size in options.sizes:
            for row in grid_of(load_target(demo, size, dtype), task, history, options):
                rows.append(row)
                write(options.out, "which strategy at which batch size?", {"rows": rows}, settings=settings)
    text = tables(rows)
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(command(Options))
