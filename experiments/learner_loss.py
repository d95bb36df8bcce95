"""Is a run the same when ranks of its learner are killed? In an update, a hand-over of weights, a checkpoint, an
evaluation, a rollout or the export, once or twice in a run.

    python -m experiments.learner_loss --model DIR [--runs 15] [--steps 5] [--seed 0]

Runs the demo from the model DIR undisturbed, in each of these variants, then --runs times with one or two SIGKILLs at
seeded moments. Every run must end by itself with the same responses, rewards, losses and gradient norms, and say what
was lost. Exit code 1 if one does not. A minute per run on two cores, one more for each variant.

    one rank     a checkpoint every second RL step; the learner records hidden states for the drafter
    two ranks    without a checkpoint before the end: every loss repeats the updates from the initial weights
    low-bit      rollouts in w8a8, which the learner mirrors; one rank
    reference    two ranks, KL in the reward, warm-up and a falling learning rate, weights broadcast in pieces
"""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from benchmarks.harness import ROOT, command, write
from benchmarks.same_losses import first_difference
from benchmarks.tools.turns import processes_of
from experiments.chaos import RUN_TIMEOUT_S, Jobs
from experiments.killing import NothingToKillError, reasons
from launch.cluster.session import ray_session
from launch.observe import now
from launch.observe.journal import read

Phase = Literal["rollout", "learn", "publish", "checkpoint", "eval", "export"]
PHASES: tuple[Phase, ...] = get_args(Phase)
COMMON = ("learner.threads=1", "drafter.offline=null", "eval.every=2", "eval.samples=1", "warmup=null")
VARIANTS: dict[str, tuple[str, ...]] = {
    "one rank": ("checkpoint.every=2", "drafter.recording.source=learner"),
    "two ranks": ("learner.ranks=2",),
    "low-bit": ("checkpoint.every=2", "rollout.quantization=w8a8"),
    "reference": (
        *("learner.ranks=2", "checkpoint.every=3", "objective.kl=k3", "objective.kl_in=reward"),
        *("objective.kl_coef=0.05", "learner.optimizer.schedule=linear", "learner.optimizer.warmup_steps=3"),
        "cluster.weights=broadcast",
    ),
}
LENGTH_S = {"rollout": 1.5, "learn": 1.0, "publish": 0.3, "checkpoint": 0.3, "eval": 1.0, "export": 0.2}


@dataclass(frozen=True, slots=True)
class Blow:
    """After `delay_s` in the phase of RL step `step`, or the first one of its kind afterwards."""

    step: int
    phase: Phase
    delay_s: float


def drawn(seed: int, steps: int) -> list[Blow]:
    source = random.Random(seed)
    blows = []
    for _ in range(source.choice((1, 1, 2))):
        phase = source.choice(PHASES)
        blows.append(Blow(source.randint(1, steps), phase, round(source.uniform(0, LENGTH_S[phase]), 3)))
    return sorted(blows, key=lambda blow: (blow.step, PHASES.index(blow.phase)))


def strike(process: "subprocess.Popen[bytes]", run: Path, blow: Blow, source: random.Random) -> str:
    """Kill one rank then; in which phase that was. Raises NothingToKillError."""
    in_step = ("rollout", "learn")
    while True:
        if process.poll() is not None:
            raise NothingToKillError("the job had ended")
        at = now.read(run)
        begun = at is not None and at.step >= blow.step - (blow.phase in in_step)
        if at is not None and begun and at.phase == blow.phase:
            break
        time.sleep(0.002)
    time.sleep(blow.delay_s)
    found = processes_of("learner")
    if process.poll() is not None or not found:
        raise NothingToKillError("no learner runs")
    source.choice(found).send_signal(signal.SIGKILL)
    at = now.read(run)
    return "?" if at is None else at.phase


def disturbed(jobs: Jobs, name: str, extra: Sequence[str], whole: Path, blows: Sequence[Blow], seed: int) -> Any:
    begin_s, source, hit = time.monotonic(), random.Random(seed), list[str]()
    process = jobs.start(name, *extra)
    try:
        for blow in blows:
            hit.append(strike(process, jobs.folder / name, blow, source))
    except NothingToKillError:
        pass  # it came too late
    try:
        code = process.wait(RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    run = jobs.folder / name
    differs = first_difference(whole, run) if code == 0 else f"exit code {code}: {jobs.log(name)[-1500:]}"
    rows = [row for row in read(run / "metrics.jsonl") if row["kind"] == "step"]
    return {
        "blows": [asdict(blow) for blow in blows],
        "killed_in": hit,
        "identical": differs is None,
        "difference": differs,
        "said": reasons(run, "learner"),
        "differs_said": [e["message"] for e in read(run / "events.jsonl") if e["kind"] == "learner_differs"],
        "recover_s": [round(row["seconds/recover"], 2) for row in rows if "seconds/recover" in row],
        "repeated_steps": int(sum(row["learner/repeated_steps"] for row in rows)),
        "seconds": round(time.monotonic() - begin_s, 1),
    }


def main(
    *overrides: Annotated[str, "of the configuration, for all runs"],
    model: Annotated[Path, "model directory of the demo"],
    runs: int = 15,
    steps: int = 5,
    seed: int = 0,
    variants: Annotated[Sequence[str], "in turn", tuple(VARIANTS)] = tuple(VARIANTS),
    folder: Path = ROOT / "runs/learner_loss",
    out: Path = ROOT / "experiments/results/learner_loss.json",
) -> int:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Mapping[str, Any]] = []
    with ray_session(address="local", cpus=16, object_store_bytes=512 * 2**20) as session:
        jobs = Jobs(folder, steps, session.address, [f"model.path={model.resolve()}", *COMMON, *overrides])
        whole: dict[str, Path] = {}
        for index in range(runs):
            variant = variants[index % len(variants)]
            if variant not in whole:
                name = f"undisturbed-{variant.replace(' ', '-')}"
                if jobs.start(name, *VARIANTS[variant]).wait(2 * RUN_TIMEOUT_S) != 0:
                    sys.exit(jobs.log(name))
                whole[variant] = folder / name
            number = 1000 * seed + index
            blows = drawn(number, steps)
            row = disturbed(jobs, f"{index:02d}", VARIANTS[variant], whole[variant], blows, number)
            rows.append({"variant": variant, **row})
            outcome = "identical" if row["identical"] else f"NOT identical: {row['difference']}"
            print(f"{index:2d} {variant}, killed in {row['killed_in']}: {outcome}; {row['recover_s']} s", flush=True)
    hit = [row for row in rows if row["killed_in"]]
    good = sum(row["identical"] for row in rows)
    # A blow in the export, or in a restart, may be one that nobody has to notice, or is noticed with the one before.
    told = sum(bool(row["said"]) for row in hit)
    found = {"runs": runs, "struck": len(hit), "identical": good, "reason_shown": told, "rows": rows}
    write(
        out, "is a run the same when ranks of its learner are killed?", found, settings={"steps": steps, "seed": seed}
    )
    print(f"{good} of {runs} identical, {len(hit)} struck, reason shown in {told}")
    return 0 if good == runs else 1


if __name__ == "__main__":
    sys.exit(command(main, timed=False))
