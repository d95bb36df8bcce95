"""A whole RL step beside TRL's GRPOTrainer: `python -m benchmarks.rl_step_vs_trl --trl-python PATH`.

Owns the comparison and `benchmarks/results/rl_step_vs_trl.json`. Both sides start from the same warm-started
checkpoint and do the same: 16 prompts x 8 responses of up to 200 tokens, two optimizer steps, no KL, two threads.
Ours is the real program in fast mode (Ray, two rollout workers, math-verify); TRL runs `trl_grpo.py` in its own
interpreter, for TRL is no dependency. It needs an idle machine: on a busy one TRL's two threads wait for each other and
it becomes tens of times slower, so the script refuses to start there; --allow-busy tries the mechanics only, writes no
speed-up, and marks the record invalid. Runs alternate, so that a noisy machine hurts both; the time of a step is from
the end of the step before it to its own end, whatever happened in between; the first steps of each run are left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import describe_machine, is_busy

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/guess_and_check"
RESULT = ROOT / "benchmarks/results/rl_step_vs_trl.json"


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    tokens: float  # generated
    reward: float  # mean over the responses


@dataclass(frozen=True, slots=True)
class Plan:
    checkpoint: Path
    steps: int  # per run
    discard: int  # first steps of each run that are not counted
    threads: int
    timeout_s: float


def warm_start(run_dir: Path, timeout_s: float) -> Path:
    """The demo's warm start, made or found in the cache of `run_dir`."""
    command = [sys.executable, "-m", "launch", "warmup", str(EXAMPLE / "config.yaml"), f"run.dir={run_dir}"]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=timeout_s, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.splitlines()[-1])


def run_ours(plan: Plan, seed: int, work: Path) -> list[Step]:
    overrides = {
        "warmup": "null",
        "model.path": plan.checkpoint,
        "model.batch_invariant": "false",
        "data.eval": "null",
        "learner.threads": plan.threads,
        "rollout.workers": plan.threads,
        "rollout.engine.threads": 1,
        "observe.live": "false",
        "run.steps": plan.steps,
        "run.seed": seed,
        "run.name": "ours",
        "run.dir": work,
    }
    command = [sys.executable, "-m", "launch", "train", str(EXAMPLE / "config.yaml")]
    command += [f"{key}={value}" for key, value in overrides.items()]
    run(command, plan, {})
    lines = (work / "ours" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return our_steps([json.loads(line) for line in lines], plan.discard)


def our_steps(records: list[dict[str, Any]], discard: int) -> list[Step]:
    """`at_s` is written when a step is complete. The first step has no predecessor, so `discard` is at least 1."""
    rows = [record for record in records if record["kind"] == "step"]
    steps = [
        Step(after["at_s"] - before["at_s"], after["tokens/generated"], after["reward/mean"])
        for before, after in pairwise(rows)
    ]
    return steps[max(discard - 1, 0) :]


def run_trl(plan: Plan, python: Path, seed: int, work: Path) -> tuple[list[Step], dict[str, str]]:
    out = work / "trl.json"
    command = [str(python), str(ROOT / "benchmarks/trl_grpo.py"), "--model", str(plan.checkpoint)]
    command += ["--train", str(EXAMPLE / "data/train.jsonl"), "--out", str(out), "--work", str(work / "trl")]
    command += ["--steps", str(plan.steps), "--threads", str(plan.threads), "--seed", str(seed)]
    run(command, plan, {"OMP_NUM_THREADS": str(plan.threads)})
    result = json.loads(out.read_text(encoding="utf-8"))
    return [Step(**step) for step in result["steps"]][plan.discard :], result["versions"]


def run(command: list[str], plan: Plan, environment: dict[str, str]) -> None:
    """Raises CalledProcessError (its output is shown then) or TimeoutExpired."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description="One RL step: Paceline beside TRL.")
    parser.add_argument("--trl-python", type=Path, required=True, help="interpreter in which `import trl` works")
    parser.add_argument("--checkpoint", type=Path, help="warm-started model (default: the demo's, made if needed)")
    parser.add_argument("--steps", type=int, default=9, help="RL steps of one run (default: 9)")
    parser.add_argument("--discard", type=int, default=1, help="first steps of a run left out (default: 1)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, alternating (default: 3)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="limit of one run")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--allow-busy", action="store_true", help="try the script on a busy machine; never a result")
    options = parser.parse_args()
    if not 1 <= options.discard < options.steps:
        parser.error("--discard must be at least 1 and less than --steps")
    machine = describe_machine()
    busy = is_busy()
    if busy and not options.allow_busy:
        parser.error(
            f"the machine is busy (load {machine['load_1min']}): timings would be meaningless; see --allow-busy"
        )
    if busy and options.out == RESULT:
        parser.error("--allow-busy needs an --out of its own: what it measures is not a result")
    checkpoint = options.checkpoint or warm_start(ROOT / "runs", options.timeout_s)
    plan = Plan(checkpoint.resolve(), options.steps, options.discard, options.threads, options.timeout_s)

    ours: list[Step] = []
    trl: list[Step] = []
    versions: dict[str, str] = {}
    for seed in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="rl-step-") as folder:
            mine = run_ours(plan, seed, Path(folder))
            theirs, versions = run_trl(plan, options.trl_python, seed, Path(folder))
        ours += mine
        trl += theirs
        print(f"run {seed}: ours {medians(mine)['seconds_per_step']:.2f} s/step", end=", ")
        print(f"TRL {medians(theirs)['seconds_per_step']:.2f} s/step", flush=True)
    a, b = medians(ours), medians(trl)
    record: dict[str, Any] = {
        "machine": machine,
        "valid": not busy,
        "plan": {"steps": plan.steps, "discard": plan.discard, "threads": plan.threads, "repeats": options.repeats},
        "trl_versions": versions,
        "paceline": a | {"all": [asdict(step) for step in ours]},
        "trl": b | {"all": [asdict(step) for step in trl]},
    }
    if not busy:
        record["speedup_step"] = b["seconds_per_step"] / a["seconds_per_step"]
        record["speedup_tokens_per_s"] = a["tokens_per_s"] / b["tokens_per_s"]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, side in (("Paceline", a), ("TRL", b)):
        print(
            f"{name:9} {side['seconds_per_step']:.2f} s/step  {side['tokens_per_step']:,.0f} tokens/step  "
            f"{side['tokens_per_s']:,.0f} tokens/s  reward {side['reward']:.2f}"
        )
    if busy:
        print("the machine was busy: this shows that the script runs, and nothing about speed")
        return
    print(f"speed-up: {record['speedup_step']:.2f}x per step, {record['speedup_tokens_per_s']:.2f}x in tokens/s")


if __name__ == "__main__":
    main()
