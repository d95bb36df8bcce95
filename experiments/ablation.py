"""The gain of each system, and of all together: `python -m experiments.ablation [KEY=VALUE ...] [--seeds 0 1]`.

Cells: nothing (plain decoding, full precision, equal rollouts per prompt), half (the same with half as many rollouts:
the effect of a halved budget without any system), tlt, das, efficient_rollout, duet, qarl and everything, on the demo
and on the task with wide difficulty, by paired seeds. A cell is a system's example (`examples/systems`) on the task's
data, prompts, lengths and reward, from the warm start of its seed, which all systems share. The protocol was written
before the first run:

- `timed`: one cell is one run of `paceline train`, alone on the machine, with as many RL steps as the task's own
  example. Seconds are those of RL steps, without warm start, the drafter's first fit, evaluations and the program's
  start. It goes seed by seed, in an order that rotates with the seed, so that drift of the machine affects all systems
  alike. Before the first one both precisions are calibrated (`paceline calibrate`), and runs reuse earlier runs'
  measurements.
- `learned`: held-out reward after the last RL step on more seeds, by launch.local with one learner thread, for the
  systems that learn from other tokens than nothing. The others have its tokens (`same_tokens` in the record says
  whether their timed runs had).
- Nothing is selected or tuned. A run that ends with an error is in the table.

The journal in `--run-dir` has a line for each finished cell, which is not run again. Each call writes the record and
the tables, also into docs/results/ablation.md. `--tables`: only that.
"""

import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from benchmarks.harness import ROOT, command, write
from benchmarks.seeds import run_seed
from config.tree import Config
from experiments.ablation_report import write_pages
from launch.config import load_config
from launch.observe.journal import read

Kind = Literal["timed", "learned"]
EXAMPLES = ROOT / "examples"
NOTHING = ("rollout.speculation={mode: off}", "drafter={train: false}")  # the task's own example
SYSTEMS = ("nothing", "half", "tlt", "das", "efficient_rollout", "duet", "qarl", "everything")
OTHER_TOKENS = ("nothing", "half", "duet", "qarl", "everything")
TASKS = ("guess_and_check", "long_guess_and_check")
OF_THE_TASK = (
    *("data", "reward", "eval", "run.steps", "rollout.sampling", "rollout.prompts_per_step"),
    *("rollout.rollouts_per_prompt", "learner.optimizer", "learner.mini_batches"),
)
PLAIN = (*NOTHING, "rollout.workers=1", "learner.threads=1")
QUIET = ("checkpoint.every=0", "observe={live: false, tensorboard: false}")
SUMMED = {"tokens": "tokens/generated", "rl_s": "seconds/step", "rollout_s": "seconds/rollout"}
SUMMED |= {"learn_s": "seconds/learn", "reward_wait_s": "seconds/reward_wait", "publish_s": "seconds/publish"}
SUMMED |= {"sync_s": "seconds/sync", "saved_s": "speculation/saved_s", "engine_steps": "engine/steps"}
MEANS = {"speculated": "speculation/share", "accept_length": "speculation/accept_length", "gap": "logprob_gap/mean"}
MEANS |= {"given_up": "abort/given_up_share", "reward": "reward/mean", "length": "length/mean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One cell. Plain data, passed to another process."""

    kind: Kind
    task: str
    system: str
    seed: int
    extra: tuple[str, ...]
    run_dir: Path

    @property
    def key(self) -> tuple[str, int, str]:
        """The key of the journal."""
        return f"{self.kind} {self.task} {self.system}", self.seed, " ".join(self.extra)

    @property
    def config(self) -> Path:
        alone = self.system in ("nothing", "half")
        return EXAMPLES / self.task / "config.yaml" if alone else EXAMPLES / f"systems/{self.system}.yaml"

    def overrides(self, model: Path) -> list[str]:
        """Return the overrides of its configuration, from that warm start."""
        task = load_config(EXAMPLES / self.task / "config.yaml").config
        mine = ["warmup=null", f"model.path={model}", f"run.dir={self.run_dir}", f"run.seed={self.seed}", *QUIET]
        mine += NOTHING if self.system in ("nothing", "half") else ()
        if self.system == "half":
            mine.append(f"rollout.rollouts_per_prompt={task.rollout.rollouts_per_prompt // 2}")
        mine += PLAIN if self.kind == "learned" else ()
        last = {pair.partition("=")[0]: pair for pair in (*of_the_task(task), *mine, *self.extra)}
        return list(last.values())


class Journal:
    """Finished runs, one line of JSON each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def rows(self) -> list[dict[str, Any]]:
        """Return the first row of each run."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        found: dict[tuple[str, int, str], dict[str, Any]] = {}
        for row in map(json.loads, lines):
            found.setdefault((row["cell"], row["seed"], row["extra"]), row)
        return list(found.values())

    def add(self, row: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(row) + "\n")


def of_the_task(config: Config) -> Iterator[str]:
    """Yield the KEY=VALUE of a task's file that move it into another configuration."""
    written = config.model_dump(mode="json", exclude_unset=True)
    for key in OF_THE_TASK:
        value: Any = written
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            yield f"{key}={json.dumps(value)}"


def warm_start(task: str, seed: int, run_dir: Path) -> Path:
    """Return the initial weights of a task and seed, made now (a minute of one core) or found in `run_dir`."""
    from launch.local import initial_weights

    fixed = ["learner.threads=1", f"run.dir={run_dir}", f"run.seed={seed}"]
    return initial_weights(load_config(EXAMPLES / task / "config.yaml", fixed).config)


def timed(run: Run, warm: Path) -> dict[str, Any]:
    """Run the program once."""
    name = f"{run.task}-{run.system}"
    try:
        found = run_seed(run.seed, run.config, run.run_dir, run.overrides(warm), 600.0, name=name)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return row_of(run) | {"error": str(error)}
    records = read(run.run_dir / f"{name}-{run.seed}" / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    last = [record for record in records if record["kind"] == "eval"][-1]
    masters = {"after_masters": last["eval/master_reward"]} if "eval/master_reward" in last else {}
    return row_of(run) | {"before": found.before, "after": found.after, "wall_s": found.wall_s} | masters | means(steps)


def learned(run: Run, warm: Path) -> dict[str, Any]:
    """Do the same without the program around it, and without its seconds."""
    from launch.local import RunRecord, record_run

    config, record = load_config(run.config, run.overrides(warm)).config, RunRecord()
    record_run(config, record)
    before, after = (record.evaluations[step]["eval/reward"] for step in (0, config.run.steps))
    steps = [step.metrics for step in record.steps]
    found = {key: value for key, value in means(steps).items() if not key.endswith("_s")}
    return row_of(run) | {"before": before, "after": after, "cpu_s": round(record.cpu_s, 1)} | found


def row_of(run: Run) -> dict[str, Any]:
    cell, seed, extra = run.key
    return {"cell": cell, "seed": seed, "extra": extra, "kind": run.kind, "task": run.task, "system": run.system}


def means(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return sums over the RL steps, and means over those that have the value."""
    sums = {key: sum(row.get(name, 0.0) for row in steps) for key, name in SUMMED.items()}
    of = {key: [row[name] for row in steps if name in row] for key, name in MEANS.items()}
    return {"steps": len(steps)} | sums | {key: fmean(values) for key, values in of.items() if values}


def calibrate(run_dir: Path) -> None:
    """Calibrate steps and drafts in both precisions, unless an earlier run has."""
    for precision in ("none", "w8a8"):
        done = run_dir / f"calibrated-{precision}"
        if done.exists():
            continue
        example, chosen = (
            EXAMPLES / "systems/everything.yaml",
            [f"rollout.quantization={precision}", f"run.dir={run_dir}"],
        )
        words = [sys.executable, "-m", "launch", "calibrate", str(example), *chosen, "--seconds", "20"]
        subprocess.run(words, cwd=ROOT, check=True)
        done.touch()


def in_order(tasks: Sequence[str], systems: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """Yield task, system, seed: complete pairs early, starting with another system for every task and seed."""
    for turn, (seed, task) in enumerate((seed, task) for seed in seeds for task in tasks):
        at = 3 * turn % len(systems)
        for system in (*systems[at:], *systems[:at]):
            yield task, system, seed


def main(
    *overrides: Annotated[str, "KEY=VALUE of the configuration, for all cells"],
    kind: Annotated[Kind, "timed: seconds; learned: held-out reward on more seeds, without seconds"] = "timed",
    tasks: Annotated[Sequence[str], "folders of examples/ with their data made"] = TASKS,
    systems: Annotated[Sequence[str], "cells", SYSTEMS] = SYSTEMS,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    processes: Annotated[int, "learned runs and warm starts at a time"] = 1,
    tables: Annotated[bool, "write the record and the pages from the journal"] = False,
    run_dir: Annotated[Path, "journal, warm starts, runs"] = ROOT / "runs/ablation",
    out: Path = ROOT / "experiments/results/ablation.json",
) -> None:
    folder, extra = run_dir.resolve(), tuple(overrides)
    journal = Journal(folder / "journal.jsonl")
    asked = [
        Run(kind=kind, task=task, system=system, seed=seed, extra=extra, run_dir=folder)
        for task, system, seed in in_order(tasks, systems, seeds)
        if kind == "timed" or system in OTHER_TOKENS
    ]
    done = {(row["cell"], row["seed"], row["extra"]) for row in journal.rows()}
    if not tables:
        make_all([run for run in asked if run.key not in done], journal, folder, processes)
    rows = [row for row in journal.rows() if row["extra"] == " ".join(extra)]
    found = {"runs": rows, "same_tokens": same_tokens(rows)}
    write(out, "what is each system worth, and all together?", found, settings={"overrides": overrides})
    print(write_pages(out))


def make_all(runs: Sequence[Run], journal: Journal, folder: Path, processes: int) -> None:
    """Run these cells. Writes a journal line for each that has ended."""
    warm = {(run.task, run.seed): (run.task, run.seed, folder) for run in runs}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=one_thread) as pool:
        models = {key: pool.submit(warm_start, *where) for key, where in warm.items()}
        found = {key: model.result() for key, model in models.items()}
        if any(run.kind == "learned" for run in runs):
            begun = [pool.submit(learned, run, found[run.task, run.seed]) for run in runs]
            tell(runs, (done.result() for done in as_completed(begun)), journal)
            return
    if runs:
        calibrate(folder)
    tell(runs, (timed(run, found[run.task, run.seed]) for run in runs), journal)


def tell(runs: Sequence[Run], rows: Iterator[dict[str, Any]], journal: Journal) -> None:
    for number, row in enumerate(rows, 1):
        journal.add(row)
        said = row.get("error") or f"{row['before']:.3f} -> {row['after']:.3f}, {row['tokens']:,.0f} tokens"
        said += f", RL {row['rl_s']:.1f} s" if "rl_s" in row else ""
        print(f"{number}/{len(runs)} {row['cell']} seed {row['seed']}: {said}", flush=True)


def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def same_tokens(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return, by task and lossless system, whether its timed runs drew as many tokens as nothing's, and ended with its
    reward, on every seed."""
    timed_rows = {(r["task"], r["system"], r["seed"]): r for r in rows if r["kind"] == "timed" and "error" not in r}
    found: dict[str, bool] = {}
    for (task, system, seed), row in timed_rows.items():
        base = timed_rows.get((task, "nothing", seed))
        if system not in OTHER_TOKENS and base is not None:
            same = all(row[key] == base[key] for key in ("tokens", "before", "after"))
            found[f"{task} {system}"] = found.get(f"{task} {system}", True) and same
    return found


if __name__ == "__main__":
    command(main, timed=not {"learned", "--tables"} & set(sys.argv))
