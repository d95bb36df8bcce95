"""One token budget on 20 paired seeds: `python -m experiments.token_budget [--task NAME] [--cells both@0.5 ...]
[--seeds 0 1 ...] [--processes 2] [KEY=VALUE ...]`, and with `--wall` the seconds of the program itself.

Owns the protocol and the journal of finished runs; the table is experiments.token_budget_report. The protocol was
written before the first run:

- A cell is a form and a budget b of the example's own RL step (n responses to each prompt). `grpo` and `dapo` (whose
  further rounds count) ask for n b each; `allocator` shares out the tokens that n b would cost; `abort` asks for n b
  and gives nine late ones in ten up; `both` is allocator and abort. These three learn with the objective `duet`; `duet`
  and `dr_grpo` ask for n b, and tell what objectives without standard deviations do by themselves. In `abort_auto` and
  `both_auto` the keep probability is chosen (rollout.abort.keep=auto), with `_q60` late begins at the quantile 0.6.
- All cells have the example's number of RL steps, learning rate and everything else. Nothing is tuned by cell.
- Seed s starts from the warm start of seed s modulo 5, which all cells share, and has its own order of prompts and
  noise, which all cells share too. Whatever is compared is compared within a seed. The cells that matter most have 20
  seeds, the others the first 10 of them.
- The figure is the held-out reward after the last RL step; no checkpoint is chosen.
- A run has failed if it ends with an error (then it counts with reward 0), or more than 0.05 below its warm start. It
  is counted, and never dropped.
- Intervals are 95 % of t over seeds; beside them those over warm starts, of the mean of the seeds that share one, since
  such seeds need not be independent.

What was known when (2026-11-23): warm starts and the seeds 0 to 2 had been looked at while the task and the rule were
made, and the cells `_auto` and `_q60` were added after two or three seeds of other cells had been seen.

Runs are made by launch.local on one thread each. The journal has a line for each finished run, also when
several commands write to it: whatever it has is not run again.
"""

import fcntl
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from actors.training.errors import NonFiniteError
from benchmarks.harness import ROOT, command, machine, write
from benchmarks.seeds import run_seed
from experiments.token_budget_report import tables
from launch.config import load_config
from launch.errors import PacelineError

WARM_STARTS = 5
FAILED_BELOW = 0.05  # the warm start's held-out reward
FIXED = ("learner.threads=1", "rollout.engine.threads=1", "drafter.train=false")
KEPT = ("budget/", "abort/", "grad_norm/", "clip", "groups/used", "loss/mean")  # means over RL steps


@dataclass(frozen=True, slots=True)
class Cell:
    """A form at a budget; written `form@budget`."""

    form: str
    budget: float

    @classmethod
    def of(cls, text: str) -> "Cell":
        form, _, budget = text.partition("@")
        return cls(form, float(budget))

    def __str__(self) -> str:
        return f"{self.form}@{self.budget:g}"

    def overrides(self, responses: int) -> list[str]:
        """Of an example that asks for so many responses to each prompt. Raises KeyError for a form that is none."""
        form = FORMS[self.form]
        fewer, share = f"rollout.rollouts_per_prompt={round(responses * self.budget)}", self.budget
        return [f"objective.name={form.objective}", f"rollout.budget.share={share}" if form.allocates else fewer] + [
            f"rollout.abort.{option}" for option in form.abort
        ]


@dataclass(frozen=True, slots=True)
class Form:
    """Of what a budget is spent on."""

    objective: str
    allocates: bool = False
    abort: tuple[str, ...] = ()  # KEY=VALUE of rollout.abort


_TENTH = ("enabled=true", "keep=0.1")
_AUTO = ("enabled=true", "keep=auto")
_EARLY = ("abort_quantile=0.6",)
FORMS = {
    "grpo": Form("grpo"),
    "dr_grpo": Form("dr_grpo"),
    "dapo": Form("dapo"),
    "duet": Form("duet"),
    "allocator": Form("duet", allocates=True),
    "abort": Form("duet", abort=_TENTH),
    "both": Form("duet", allocates=True, abort=_TENTH),
    "abort_q60": Form("duet", abort=_TENTH + _EARLY),
    "both_q60": Form("duet", allocates=True, abort=_TENTH + _EARLY),
    "abort_auto": Form("duet", abort=_AUTO),
    "both_auto": Form("duet", allocates=True, abort=_AUTO),
    "both_auto_q60": Form("duet", allocates=True, abort=_AUTO + _EARLY),
}
# Seeds and cells. What answers most comes first: a journal that is cut short has it for all its seeds.
FIRST = ("grpo@1", "both@0.5", "grpo@0.5", "allocator@0.5", "abort@0.5", "both@1", "grpo@0.25", "both@0.25")
SECOND = ("dapo@1", "dapo@0.5", "duet@1", "duet@0.5", "allocator@1", "abort@1", "dr_grpo@1")
THIRD = ("dapo@0.25", "duet@0.25", "abort@0.25", "allocator@0.25")
CHOSEN = ("both_auto@0.5", "abort_auto@0.5", "both_auto@1", "both_auto@0.25")
EARLY = ("both_q60@0.5", "abort_q60@0.5", "both_auto_q60@0.5")
TIERS = tuple(
    (most, tuple(map(Cell.of, cells)))
    for most, cells in ((20, FIRST), (20, CHOSEN), (10, SECOND), (10, THIRD), (10, EARLY))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run that is to be made. Plain data: it goes to another process."""

    config: Path
    responses: int  # rollout.rollouts_per_prompt of it
    cell: Cell
    seed: int
    extra: tuple[str, ...]  # KEY=VALUE for all cells
    run_dir: Path

    @property
    def key(self) -> tuple[str, int, str]:
        return str(self.cell), self.seed, " ".join(self.extra)

    @property
    def warm_seed(self) -> int:
        return self.seed % WARM_STARTS

    def warm(self) -> list[str]:
        """Overrides that make the warm start."""
        return [*FIXED, *self.extra, f"run.dir={self.run_dir}", f"run.seed={self.warm_seed}"]

    def overrides(self, model: Path) -> list[str]:
        """Those of the run from that warm start, for `paceline train` too."""
        mine = ["warmup=null", f"model.path={model}", f"run.dir={self.run_dir}", f"run.seed={self.seed}"]
        return [*FIXED, *mine, *self.cell.overrides(self.responses), *self.extra]


def warm_start(run: Run) -> Path:
    """The directory of its initial weights, made now or kept from earlier."""
    from launch.local import initial_weights

    return initial_weights(load_config(run.config, run.warm()).config)


def make(run: Run) -> dict[str, Any]:
    """The run, as a row of the journal."""
    from launch.local import RunRecord, record_run

    commit = machine()["commit"]  # before the first run of this process, and kept: of the code that it has loaded
    config = load_config(run.config, run.overrides(warm_start(run))).config
    record, error = RunRecord(), None
    try:
        record_run(config, record)
    except (NonFiniteError, PacelineError) as problem:  # what learning may do to a run; anything else is a fault
        error = str(problem)
    last = record.evaluations.get(config.run.steps, {})
    before, after = record.evaluations[0]["eval/reward"], last.get("eval/reward", 0.0)
    steps = [step.metrics for step in record.steps]
    return {
        "cell": str(run.cell),
        "seed": run.seed,
        "warm_seed": run.warm_seed,
        "extra": " ".join(run.extra),
        "before": before,
        "after": after,
        "failed": error is not None or not after >= before - FAILED_BELOW,
        "error": error,
        "steps": len(steps),
        "tokens": sum(metrics["tokens/generated"] for metrics in steps),
        "responses": sum(len(step.lengths) for step in record.steps),
        "length_before": record.evaluations[0]["eval/length_mean"],
        "length_after": last.get("eval/length_mean"),
        "cpu_s": round(record.cpu_s, 2),
        "metrics": means(steps),
        "rewards": [round(metrics.get("reward/mean", 0.0), 4) for metrics in steps],
        "commit": commit,
    }


def means(steps: Sequence[Any]) -> dict[str, float]:
    """Over the RL steps that have it, of every metric that may say why a cell did what it did."""
    names = sorted({name for metrics in steps for name in metrics if name.startswith(KEPT)})
    return {name: round(fmean(metrics[name] for metrics in steps if name in metrics), 6) for name in names}


def timed(run: Run) -> dict[str, Any]:
    """The program itself with the example's own workers, threads and drafts, from the same warm start."""
    mine = ["warmup=null", f"model.path={warm_start(run)}", *run.cell.overrides(run.responses), *run.extra]
    found = run_seed(
        run.seed, run.config, run.run_dir, mine, 1800.0, name=f"wall-{run.cell.form}-{100 * run.cell.budget:.0f}"
    )
    return {
        "cell": str(run.cell),
        "seed": run.seed,
        "extra": " ".join(run.extra),
        "after": found.after,
        "tokens": found.tokens,
        "rl_s": round(found.rl_s, 2),
        "tokens_per_s": round(found.tokens_per_s, 1),
    }


class Journal:
    """Finished runs, a line of JSON each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def rows(self) -> list[dict[str, Any]]:
        """The first of each run."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        found: dict[tuple[str, int, str], dict[str, Any]] = {}
        for row in map(json.loads, lines):
            found.setdefault((row["cell"], row["seed"], row["extra"]), row)
        return list(found.values())

    def lacks(self, runs: Sequence[Run]) -> list[Run]:
        """Those of `runs` that are still to be made."""
        known = {(row["cell"], row["seed"], row["extra"]) for row in self.rows()}
        return [run for run in runs if run.key not in known]

    def add(self, row: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(row) + "\n")


def in_order(cells: Sequence[Cell], seeds: Sequence[int]) -> Iterator[tuple[Cell, int]]:
    """Of these, tier by tier, in a tier seed by seed: pairs are complete early."""
    for most, tier in TIERS:
        yield from ((cell, seed) for seed in seeds if seed < most for cell in tier if cell in cells)


def make_all(runs: Sequence[Run], journal: Journal, processes: int) -> Iterator[str]:
    """Make what the journal lacks; a line for each that has ended."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started here, before they import torch
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        first = {run.warm_seed: run for run in runs}
        for number, warm in enumerate(as_completed([pool.submit(warm_start, run) for run in first.values()]), 1):
            yield f"warm start {number}/{len(first)}: {warm.result().name}"
        begin_s = time.monotonic()
        for number, done in enumerate(as_completed([pool.submit(make, run) for run in runs]), 1):
            row = done.result()
            journal.add(row)
            left_min = (time.monotonic() - begin_s) / number * (len(runs) - number) / 60
            yield (
                f"{number}/{len(runs)} {row['cell']} seed {row['seed']}: {row['before']:.3f} -> {row['after']:.3f}, "
                f"{row['tokens']:,.0f} tokens, {row['cpu_s']:.0f} s; {left_min:.0f} minutes to go"
            )


def main(
    *overrides: Annotated[str, "KEY=VALUE of the configuration, for all cells"],
    task: Annotated[str, "a folder of examples/ with its data made"] = "guess_and_check",
    cells: Annotated[Sequence[str], "form@budget; default: all"] = FIRST + SECOND + THIRD,
    seeds: Sequence[int] = tuple(range(20)),
    processes: Annotated[int, "runs at a time"] = 1,
    wall: Annotated[bool, "seconds of the program itself, one run after the other"] = False,
    run_dir: Annotated[Path, "journals and warm starts"] = ROOT / "runs/token_budget",
    out: Annotated[Path | None, "default: token_budget_TASK.json in results/"] = None,
) -> None:
    config, folder = ROOT / "examples" / task / "config.yaml", run_dir.resolve()
    responses = load_config(config).config.rollout.rollouts_per_prompt
    asked = [
        Run(config=config, responses=responses, cell=cell, seed=seed, extra=tuple(overrides), run_dir=folder)
        for cell, seed in in_order([Cell.of(text) for text in cells], seeds)
    ]
    journals = {kind: Journal(folder / f"{task}{kind}.jsonl") for kind in ("", "_wall")}
    if wall:
        for run in journals["_wall"].lacks(asked):
            journals["_wall"].add(timed(run))
    else:
        for line in make_all(journals[""].lacks(asked), journals[""], processes):
            print(line, flush=True)
    out = out or ROOT / f"experiments/results/token_budget_{task}.json"
    extra = " ".join(overrides)
    found = {kind: [row for row in journal.rows() if row["extra"] == extra] for kind, journal in journals.items()}
    record = {"runs": found[""], "wall": found["_wall"]}
    write(out, "one token budget on paired seeds", record, settings={"task": task, "overrides": list(overrides)})
    print(tables(task, found[""], found["_wall"]))


if __name__ == "__main__":
    command(main, timed=False)
