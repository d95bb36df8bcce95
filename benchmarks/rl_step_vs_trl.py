"""A whole RL step against TRL's GRPOTrainer: `python -m benchmarks.rl_step_vs_trl --trl-python PATH`.

Owns the comparison and `benchmarks/results/rl_step_vs_trl.json` (`--task smollm`: `rl_step_vs_trl_smollm.json`). Both
sides start from the same checkpoint and do the same, without KL, with two threads:

- `demo`: the tiny demo's model, warm-started, 16 prompts x 8 responses of up to 200 tokens, two optimizer steps.
- `smollm`: SmolLM2-135M-Instruct with LoRA of rank 16 on all linear layers, `examples/smollm`'s sums and system prompt,
  8 prompts x 8 responses of up to 24 tokens, one optimizer step; without the drafter that is fitted and trained.

Ours is the real program (Ray, two rollout workers, its graders; for `demo` in fast mode). TRL runs `trl_grpo.py` in its
own interpreter, since it is no dependency. It generates with transformers: of its vLLM modes `server` hands weights
over between CUDA devices, and `colocate` was not tried with vLLM's CPU wheel. The record has both sides' rewards by
seed and step (`curves`), and the number of steps at which the ranges of the seeds overlap. On a busy machine TRL's two
threads wait for each other and it becomes tens of times slower; then no speed-up is written. Runs alternate, so that
noise affects both. The time of a step is from the end of the previous step to its own end, whatever happened in
between. The first steps of each run are left out.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal

from benchmarks.harness import DEMO, RESULTS, ROOT, command, is_busy, write
from launch.config import load_config
from launch.config.hub import converted
from launch.observe.journal import read


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    tokens: float  # generated
    reward: float  # mean over the responses


@dataclass(frozen=True, slots=True)
class Task:
    """A task for both sides. TRL takes the options of `trl_grpo.py`."""

    config: Path
    record: str
    ours: Mapping[str, object]  # overrides of the configuration
    trl: Mapping[str, object]


TASKS = {
    "demo": Task(
        DEMO / "config.yaml",
        "rl_step_vs_trl.json",
        {"warmup": "null", "model.batch_invariant": "false", "data.eval": "null"},
        {"prompts": 16, "mini_batches": 2, "max_new_tokens": 200, "lr": 3e-4, "reward": "boxed"},
    ),
    "smollm": Task(
        ROOT / "examples/smollm/config.yaml",
        "rl_step_vs_trl_smollm.json",
        {
            "drafter.train": "false",
            "drafter.offline": "null",
            "eval.every": 1000,
            "rollout.sampling.temperature": 0.7,
        },
        {
            "prompts": 8,
            "mini_batches": 1,
            "max_new_tokens": 24,
            "temperature": 0.7,
            "lr": 2e-4,
            "reward": "last_number",
            "lora_rank": 16,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Plan:
    task: Task
    checkpoint: Path
    train: Path  # the prompts, in TRL's form
    system: list[str]  # the system prompt before them, if any
    dtype: Literal["float32", "bfloat16"]  # of both sides' weights
    steps: int  # per run
    discard: int  # first uncounted steps of each run
    threads: int
    timeout_s: float


def warm_start(run_dir: Path, timeout_s: float) -> Path:
    """Return the demo's warm start, made now or found in the cache of `run_dir`."""
    command = [sys.executable, "-m", "launch", "warmup", str(DEMO / "config.yaml"), f"run.dir={run_dir}"]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=timeout_s, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.splitlines()[-1])


def prepared(task: Task, checkpoint: Path | None, runs: Path, timeout_s: float) -> tuple[Path, Path, list[str]]:
    """Return the model's folder, the file of training records, and the configuration's system prompt, if it has one."""
    if task is TASKS["demo"]:
        return (checkpoint or warm_start(runs, timeout_s)).resolve(), DEMO / "data/train.jsonl", []
    config = converted(load_config(task.config, [f"run.dir={runs}"]).config, sys.stdout)
    (train,), system = config.data.sets, config.data.system_prompt
    return (checkpoint or Path(config.model.path)).resolve(), Path(train.path).resolve(), [system] if system else []


def run_ours(plan: Plan, seed: int, work: Path) -> list[Step]:
    overrides = {
        **plan.task.ours,
        "model.path": plan.checkpoint,
        "model.dtype": plan.dtype,
        "learner.threads": plan.threads,
        "rollout.workers": plan.threads,
        "rollout.engine.threads": 1,
        "observe.live": "false",
        "run.steps": plan.steps,
        "run.seed": seed,
        "run.name": "ours",
        "run.dir": work,
    }
    command = [sys.executable, "-m", "launch", "train", str(plan.task.config)]
    command += [f"{key}={value}" for key, value in overrides.items()]
    run(command, plan, {})
    return our_steps(read(work / "ours" / "metrics.jsonl"), plan.discard)


def our_steps(records: list[dict[str, Any]], discard: int) -> list[Step]:
    """Return our steps. `at_s` is written when a step is complete. The first step has no predecessor, so `discard` is
    at least 1."""
    rows = [record for record in records if record["kind"] == "step"]
    steps = [
        Step(after["at_s"] - before["at_s"], after["tokens/generated"], after["reward/mean"])
        for before, after in pairwise(rows)
    ]
    return steps[max(discard - 1, 0) :]


def run_trl(plan: Plan, python: Path, seed: int, work: Path) -> tuple[list[Step], dict[str, str]]:
    out = work / "trl.json"
    command = [str(python), "-m", "benchmarks.trl_grpo", "--model", str(plan.checkpoint)]
    command += ["--train", str(plan.train), "--out", str(out), "--work", str(work / "trl"), "--dtype", plan.dtype]
    command += ["--steps", str(plan.steps), "--threads", str(plan.threads), "--seed", str(seed)]
    command += [word for name, value in plan.task.trl.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command += [word for text in plan.system for word in ("--system-prompt", text)]
    run(command, plan, {"OMP_NUM_THREADS": str(plan.threads)})
    result = json.loads(out.read_text(encoding="utf-8"))
    return [Step(**step) for step in result["steps"]][plan.discard :], result["versions"]


def run(command: list[str], plan: Plan, environment: dict[str, str]) -> None:
    """Run a command. Raises CalledProcessError (after showing its output) or TimeoutExpired."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    try:
        subprocess.run(
            command, cwd=ROOT, env=inherited | environment, check=True, timeout=plan.timeout_s, capture_output=True
        )
    except subprocess.CalledProcessError as error:
        sys.stderr.write(error.stdout.decode(errors="replace")[-4000:] + error.stderr.decode(errors="replace")[-4000:])
        raise


def medians(steps: list[Step]) -> dict[str, float]:
    return {
        "seconds_per_step": median(step.seconds for step in steps),
        "tokens_per_step": median(step.tokens for step in steps),
        "tokens_per_s": median(step.tokens / step.seconds for step in steps),
        "reward": median(step.reward for step in steps),
        "steps": len(steps),
    }


def curves(ours: Sequence[Sequence[Step]], theirs: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """Return training rewards of both sides by seed and step, and whether they differ. They overlap at a step if the
    ranges of the two sides' seeds do."""
    sides = {
        name: [[step.reward for step in seed] for seed in of] for name, of in (("paceline", ours), ("trl", theirs))
    }
    columns = {name: list(zip(*of, strict=True)) for name, of in sides.items()}
    pairs = list(zip(columns["paceline"], columns["trl"], strict=True))
    return {
        **sides,
        "mean": {name: [fmean(column) for column in of] for name, of in columns.items()},
        "largest_difference_of_means": max(abs(fmean(a) - fmean(b)) for a, b in pairs),
        "largest_range_over_seeds": max(max(column) - min(column) for pair in pairs for column in pair),
        "steps_that_overlap": sum(max(min(a), min(b)) <= min(max(a), max(b)) for a, b in pairs),
        "steps": len(pairs),
    }


def main(
    *,
    trl_python: Annotated[Path, "interpreter in which `import trl` works (and `import peft`, of smollm)"],
    task: Annotated[str, "what is trained", tuple(TASKS)] = "demo",
    checkpoint: Annotated[Path | None, "the model; default: the task's, made if needed"] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], "of both sides' weights"] = "float32",
    steps: Annotated[int, "RL steps of one run"] = 9,
    discard: Annotated[int, "first steps of a run left out, at least 1"] = 1,
    repeats: Annotated[int, "runs of each side, alternating"] = 3,
    threads: int = 2,
    timeout_s: Annotated[float, "limit of one run"] = 1200.0,
    out: Annotated[Path | None, "default: the task's record in benchmarks/results"] = None,
) -> None:
    if not 1 <= discard < steps:
        sys.exit("--discard must be at least 1 and less than --steps")
    chosen = TASKS[task]
    model, train, system = prepared(chosen, checkpoint, ROOT / "runs", timeout_s)
    plan = Plan(chosen, model, train, system, dtype, steps, discard, threads, timeout_s)
    runs: list[list[Step]] = []
    trl_runs: list[list[Step]] = []
    versions: dict[str, str] = {}
    for seed in range(repeats):
        with tempfile.TemporaryDirectory(prefix="rl-step-") as folder:
            runs.append(run_ours(plan, seed, Path(folder)))
            found, versions = run_trl(plan, trl_python, seed, Path(folder))
            trl_runs.append(found)
        ours, theirs = [*chain(*runs)], [*chain(*trl_runs)]
        print(f"runs up to {seed}: {json.dumps({'ours': medians(ours), 'TRL': medians(theirs)})}", flush=True)
    a, b = medians(ours), medians(theirs)
    record: dict[str, Any] = {
        "valid": not is_busy(),
        "trl_versions": versions,
        "paceline": a | {"all": [asdict(step) for step in ours]},
        "trl": b | {"all": [asdict(step) for step in theirs]},
        "curves": (rewards := curves(runs, trl_runs)),
    }
    print("rewards of the two overlap at {steps_that_overlap} of {steps} steps".format(**rewards))
    if is_busy():
        print("the machine was busy: this shows that the script runs, and nothing about speed")
    else:
        record["speedup_step"] = b["seconds_per_step"] / a["seconds_per_step"]
        record["speedup_tokens_per_s"] = a["tokens_per_s"] / b["tokens_per_s"]
        print(f"speed-up: {record['speedup_step']:.2f}x per step, {record['speedup_tokens_per_s']:.2f}x in tokens/s")
    settings = {
        "task": task,
        "dtype": dtype,
        "steps": steps,
        "discard": discard,
        "threads": threads,
        "repeats": repeats,
        "seed": list(range(repeats)),
    }
    write(out or RESULTS / chosen.record, "a whole RL step beside TRL's GRPOTrainer", record, settings=settings)


if __name__ == "__main__":
    command(main)
