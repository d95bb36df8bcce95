"""Is a run with drafter training the same when a part of it is killed? In turn: trainer, rollout worker, engine,
coordinator, data buffer, reward worker, learner rank (experiments.learner_loss says more of that).

    python -m experiments.chaos [--runs 20] [--steps 5] [--seed 0]

Runs the demo from its cached warm start once undisturbed, then --runs times with one SIGKILL at a seeded moment each.
Every run must end by itself with the same responses, rewards, losses and gradient norms, and say what was lost. With
an engine that is not batch-invariant (rollout.engine.backend=vllm, in its environment) responses need not be the same:
then every step must have all its rollouts, graded. Exit code 1 if one run does not. A minute per run on two cores.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from actors.engine.capabilities import BACKENDS
from benchmarks.harness import DEMO, ROOT, command, write
from benchmarks.same_losses import first_difference
from experiments.killing import VICTIMS, Moment, NothingToKillError, VictimName, kill_at, reasons, step_seconds
from launch.cluster.session import ray_session
from launch.config import load_config
from launch.observe.journal import read

CONFIG = DEMO / "config.yaml"
ATTEMPTS = 3  # to find something to kill
RUN_TIMEOUT_S = 300.0


class Jobs:
    """Starts the demo's job in processes of their own on one Ray head."""

    def __init__(self, folder: Path, steps: int, address: str, extra: Sequence[str]) -> None:
        self.folder, self._steps, self._address, self._extra = folder, steps, address, extra

    def start(self, name: str, *more: str) -> "subprocess.Popen[bytes]":
        """`more`: overrides of this run, which come before the others."""
        overrides = [
            f"run.name={name}",
            f"run.dir={self.folder}",
            f"run.steps={self._steps}",
            "drafter.train=true",
            "observe.samples_per_step=100000",  # all
            "observe.tensorboard=false",
            "checkpoint.every=0",
            *self._extra,
            *more,
        ]
        last = {override.partition("=")[0]: override for override in overrides}
        shutil.rmtree(self.folder / name, ignore_errors=True)
        environment = {**os.environ, "RAY_ADDRESS": self._address}
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "launch", "train", str(CONFIG), *last.values()],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


def undisturbed(jobs: Jobs) -> dict[int, float]:
    """Seconds of each RL step."""
    process = jobs.start("undisturbed")
    if process.wait(2 * RUN_TIMEOUT_S) != 0:
        sys.exit(jobs.log("undisturbed"))
    return step_seconds(jobs.folder / "undisturbed")


def complete(run: Path, steps: int) -> bool:
    """Every RL step was done once, and no rollout of it is missing."""
    rows = [record for record in read(run / "metrics.jsonl") if record["kind"] == "step"]
    whole = all(row["rollouts/failed"] == 0 and row["groups/ungraded"] == 0 for row in rows)
    return whole and [row["step"] for row in rows] == list(range(1, steps + 1))


def disturbed(
    jobs: Jobs, index: int, victim: VictimName, seconds: dict[int, float], seed: int, *, exact: bool
) -> dict[str, Any]:
    """One run. `exact`: it must sample what the undisturbed one did. A moment that comes too late, when the job is
    over, is drawn again."""
    name = f"{index:02d}-{victim}"
    for attempt in range(ATTEMPTS):
        moment = Moment.draw(1000 * seed + 10 * index + attempt, len(seconds))
        begin_s = time.monotonic()
        process = jobs.start(name)
        try:
            kill = kill_at(process, jobs.folder / name, victim, moment, seconds)
        except NothingToKillError as error:
            if process.wait(RUN_TIMEOUT_S) != 0:
                sys.exit(f"{name} failed undisturbed: {jobs.log(name)[-2000:]}")
            print(f"{name}: {error}; another moment", flush=True)
            continue
        try:
            code = process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        run = jobs.folder / name
        same = exact and code == 0
        differs = first_difference(jobs.folder / "undisturbed", run) if same else None
        said = reasons(run, victim)
        return {
            "victim": victim,
            "killed": kill.title.strip(),
            "at": asdict(moment),
            "states": kill.states,
            "exit_code": code,
            "identical": same and differs is None,
            "complete": code == 0 and complete(run, len(seconds)),
            "difference": differs,
            "reason": said[0] if said else None,
            "events": _events_after(run, kill.at_s),
            "seconds": round(time.monotonic() - begin_s, 1),
        }
    raise SystemExit(f"{name}: no moment was found in {ATTEMPTS} runs")


def _events_after(run: Path, at_s: float) -> list[str]:
    events = [e for e in read(run / "events.jsonl") if e["at_s"] >= at_s]
    return [f"{e['kind']}: {e['message']}"[:300] for e in events if e["kind"] not in ("checkpoint", "finished")]


def main(
    *overrides: Annotated[str, "of the configuration, for all runs"],
    runs: int = 20,
    steps: int = 5,
    seed: int = 0,
    victims: Annotated[Sequence[VictimName], "in turn"] = VICTIMS,
    folder: Annotated[Path, "its runs, and the warm start's cache"] = ROOT / "runs/chaos",
    out: Path = ROOT / "experiments/results/chaos.json",
) -> int:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    backend = load_config(CONFIG, overrides).config.rollout.engine.backend
    exact = BACKENDS[backend].batch_invariant
    wanted = "identical" if exact else "complete"
    with ray_session(address="local", cpus=16, object_store_bytes=512 * 2**20) as session:
        jobs = Jobs(folder, steps, session.address, overrides)
        seconds = undisturbed(jobs)
        print(f"undisturbed: {sum(seconds.values()):.1f} s in {len(seconds)} RL steps", flush=True)
        for index in range(runs):
            victim = victims[index % len(victims)]
            row = disturbed(jobs, index, victim, seconds, seed, exact=exact)
            rows.append(row)
            outcome = wanted if row[wanted] else f"NOT {wanted}: {row['difference'] or row['exit_code']}"
            print(f"{index:2d} {victim} in step {row['at']['step']}: {outcome}; {row['reason']}", flush=True)
    good, told = sum(row[wanted] for row in rows), sum(row["reason"] is not None for row in rows)
    found = {"runs": runs, wanted: good, "reason_shown": told, "rows": rows}
    settings = {"steps": steps, "seed": seed, "config": str(CONFIG.relative_to(ROOT)), "backend": backend}
    write(out, "is a run the same when a part of it is killed?", found, settings=settings)
    print(f"{good} of {runs} {wanted}, reason shown in {told}")
    return 0 if good == told == runs else 1


if __name__ == "__main__":
    sys.exit(command(main, timed=False))
