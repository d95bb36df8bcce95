"""Accept length and speed-up over depth, top-k, tokens to verify and batch size, and what the chooser makes of them.

    python -m experiments.strategy_grid [--sizes 20m] [--dtypes float32] [--drafters suffix] [--eagle 20m=DIR]

Owns `results/strategy_grid.json` and `strategy_grid.md`: the tables beside TLT's Tables 1 and 4 and Figure 13. Requests
are those of `benchmarks.rollout`, but the running batch is kept full: as one ends the next takes its place, and only
steps with exactly that many running requests count. A cell's speed-up is over plain decoding at the same batch size,
measured between the cells. The chooser then decodes with all cells of its batch size as arms, plain decoding among
them; its regret is what the arm it used most, in the second half of that run, lacks to the best cell.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch

from benchmarks.harness import ROOT, command, write
from benchmarks.tools import rollouts
from benchmarks.tools.contenders import Contender, adaptive, fixed
from benchmarks.tools.rollouts import MEASURED_EPOCH, WARMUP_EPOCH, History, Run, decode, engine_options, waves
from benchmarks.tools.targets import DTYPES, SIZES, Target, Task, find_demo, load_target, load_task
from experiments.grid_report import tables
from policies.speculation.strategy import PLAIN, Strategy

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
    drafters: Sequence[str] = ("suffix", "ngram", "eagle")
    eagle: Annotated[Sequence[str], "SIZE=DIR: drafter weights of a size"] = ()
    repeats: int = 2
    chooser_runs: Annotated[int, "runs that the chooser learns in"] = 6
    seconds: Annotated[float, "of a plain run"] = 1.0
    threads: int = 2
    out: Path = ROOT / "experiments/results/strategy_grid.json"


def strategy(drafter: str, depth: int, top_k: int, verify: int) -> Strategy:
    """The strategy with these parameters; a chain verifies its depth, and no path is deeper than what is verified."""
    depth = min(depth, verify)
    return Strategy(drafter, depth) if top_k == 1 else Strategy(drafter, depth, top_k, verify)


def cells(drafter: str, batch: int) -> list[Strategy]:
    """The grid of a batch size: depth x tokens to verify, and top-k, at batch 1; tokens to verify elsewhere."""
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

    def __init__(self, target: Target, task: Task, history: History, batch: int, seconds: float) -> None:
        self.target, self.history, self.batch, self._task = target, history, batch, task
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

    def token_s(self, contender: Contender | None = None) -> tuple[float, float]:
        """(Seconds per token, accept length) at the full batch; None: plain decoding."""
        run = self.run(contender)
        speed = rollouts.speed_of(run.steps, running=self.batch)
        return speed.token_s, speed.accept_length

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
        plain = [bench.token_s()[0]]
        found = {}
        for number, cell in enumerate(strategies):
            found[cell], accepted[cell] = bench.token_s(fixed(bench.target, str(cell), eagle))
            if number % 6 == 5:
                plain.append(bench.token_s()[0])
        plain.append(bench.token_s()[0])
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


def measure_choice(bench: Bench, row: Sequence[dict[str, Any]], eagle: str | None, repeats: int) -> dict[str, Any]:
    """What the default policy makes of the cells in `repeats` runs like theirs, between plain ones."""
    names = [cell["strategy"] for cell in row]
    chooser = adaptive(bench.target, eagle=eagle, strategies=names, max_running=bench.batch)
    policy = chooser.policy()
    kept = Contender("chooser", lambda: policy, chooser.drafters)
    steps, plain = [], []
    for i in range(repeats):
        plain.append(bench.token_s()[0])
        run = bench.run(kept, WARMUP_EPOCH if i == 0 else MEASURED_EPOCH)
        steps += [step for step in run.steps if not step.prefill_tokens]
    full = [step for step in steps if step.running == bench.batch]
    late = full[len(full) // 2 :]
    chosen, count = Counter(str(step.strategy) for step in late).most_common(1)[0]
    best = max(row, key=lambda cell: cell["speedup"])
    speedup_of = {cell["strategy"]: cell["speedup"] for cell in row} | {str(PLAIN): 1.0}
    best_speedup = max(1.0, best["speedup"])
    reached = fmean(plain) / rollouts.Speed.of(late).token_s
    return {
        "best": best["strategy"] if best["speedup"] > 1 else str(PLAIN),
        "best_speedup": best_speedup,
        "chosen": chosen,
        "chosen_share": round(count / len(late), 3),
        "chosen_speedup": speedup_of[chosen],
        "choice_regret": round(1 - speedup_of[chosen] / best_speedup, 3),
        "reached_speedup": round(reached, 3),
    }


def grid_of(target: Target, task: Task, history: History, options: Options) -> Iterator[dict[str, Any]]:
    eagle = dict(pair.split("=", 1) for pair in options.eagle).get(target.size)
    drafters = [name for name in options.drafters if name != "eagle" or eagle is not None]
    for batch in options.batches:
        bench = Bench(target, task, history, batch, options.seconds)
        for drafter in drafters:
            row = measure_cells(bench, cells(drafter, batch), eagle, options.repeats)
            choice = measure_choice(bench, row, eagle, options.chooser_runs)
            print(
                f"{target.name} batch {batch} {drafter}: best {choice['best']} {choice['best_speedup']:.2f}x, chosen "
                f"{choice['chosen']} ({choice['chosen_share']:.0%} of late steps), "
                f"regret {choice['choice_regret']:.1%}, reached {choice['reached_speedup']:.2f}x",
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


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    demo = find_demo(options.target)
    task = load_task(demo)
    settings = {"repeats": options.repeats, "chooser_runs": options.chooser_runs, "seconds": options.seconds}
    settings |= {"threads": options.threads, "temperature": 1.0, "seed": rollouts.SEED}
    rows: list[dict[str, Any]] = []
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
