"""What are rollout workers worth that come and go? One joins in the middle of a step, and is let go between rollouts.

    python -m experiments.elastic warmup=null model.path=MODEL [key=value ...]

Real raylets with pretended resources on this machine, the demo with larger steps, engines and learner on one thread
each. An engine step takes at least `--step-ms`, as a larger model's on a GPU does (experiments/paced): otherwise two
engines share two cores with the driver, with Ray and with a node that starts, and a second one is worth little. `one`:
one worker, one step. `elastic`: {min: 1, max: 2}; a node joins early in step 1, and with it the second worker, which is
let go in later tails, and asked for again while the learner works. `two`: two workers. `elastic` must sample and learn
the same as `one` in step 1 and as `two` in all, or the exit code is 1. Worker-seconds are of places: the time of
starting counts.

    python -m experiments.elastic --only resumed three --out FILE warmup=null model.path=MODEL

`resumed`: {min: 1, max: 3} with drafter training and evaluation; a node joins in step 1, step 3 is interrupted, and the
run resumed. It must sample, learn and evaluate the same as `three`, which has three workers and is not disturbed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from benchmarks.harness import DEMO, ROOT, command, write
from benchmarks.same_losses import first_difference
from experiments.nodes import Nodes
from launch.observe import now
from launch.observe.journal import read
from policies.fleet import IDLE_S, margin_s

RUN_TIMEOUT_S = 900.0
WORKERS: dict[str, int | str] = {"one": 1, "elastic": "{min: 1, max: 2}", "two": 2}
WHOLE: dict[str, int | str] = {"three": 3, "resumed": "{min: 1, max: 3}"}
SAME = (("elastic", "one"), ("elastic", "two"), ("resumed", "three"))  # in the steps that both have
PACED = ROOT / "experiments/paced"
EARLY = 0.1  # share of step 1's responses: then the node joins
TOLD = ("worker_joined", "worker_left", "worker_unplaced", "worker_lost", "worker_restarted")

Act = Callable[[subprocess.Popen[bytes]], None]


class Runs:
    """The demo's jobs, one after the other."""

    def __init__(self, folder: Path, nodes: Nodes, settings: Sequence[str]) -> None:
        self.folder, self._nodes, self._settings = folder, nodes, settings

    def run(self, name: str, *arguments: str, acts: Sequence[tuple[int, float, Act]] = ()) -> int:
        """To its end; the exit code. `acts`: what is done after so many RL steps and this share of the next rollout."""
        run, left = self.folder / name, list(acts)
        workers = (WORKERS | WHOLE)[name]
        overrides = [f"run.name={name}", f"run.dir={self.folder}", f"rollout.workers={workers}", *self._settings]
        with self.log(name).open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "launch", "train", str(DEMO / "config.yaml"), *overrides, *arguments],
                env=self._nodes.environment(),
                stdout=out,
                stderr=out,
                cwd=ROOT,
            )
            try:
                while left and process.poll() is None:
                    steps, share, act = left[0]
                    doing = now.read(run)
                    rolls = doing is not None and doing.phase == "rollout" and doing.step == steps
                    if doing is not None and rolls and doing.done >= share * max(doing.total, 1):
                        act(process)
                        left.pop(0)
                    time.sleep(0.05)
                return process.wait(RUN_TIMEOUT_S)
            finally:
                process.kill()

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def told(self, name: str, code: int) -> dict[str, Any]:
        if code != 0:
            sys.exit(self.log(name).read_text(errors="replace")[-3000:])
        found = told(self.folder / name)
        print(f"{name}: {found}", flush=True)
        return found


def told(run: Path) -> dict[str, Any]:
    """What a run says of its steps and of its fleet."""
    rows = [row for row in read(run / "metrics.jsonl") if row["kind"] == "step"]
    names = ("seconds/step", "seconds/rollout", "seconds/learn", "fleet/worker_seconds", "fleet/idle_seconds")
    found: dict[str, Any] = {name: [round(row[name], 2) for row in rows] for name in names}
    found["tokens/generated"] = [row["tokens/generated"] for row in rows]
    events = list(read(run / "events.jsonl"))
    begin_s = min(event["at_s"] for event in events)
    found["events"] = [
        f"{event['at_s'] - begin_s:.1f} s, {event['kind']}: {event['message']}"
        for event in events
        if event["kind"] in TOLD
    ]
    joined = [event["message"] for event in events if event["kind"] == "worker_joined"]
    found["start_s"] = [float(message.split()[-2]) for message in joined]
    return found


def first_steps(run: Path, steps: int) -> Path:
    """A copy of what the run wrote of these."""
    part = run.with_name(f"{run.name}-{steps}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    for name in ("metrics", "lengths", "samples", "eval_samples"):
        lines = (run / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= steps]
        (part / f"{name}.jsonl").write_text("".join(kept), encoding="utf-8")
    return part


def gains(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Shares of what a fixed fleet took, and seconds. In its first step the elastic one knows nothing of its waits, and
    after the last rollout it lets all go that it may."""
    gain: dict[str, float] = {}
    if {"one", "elastic"} <= found.keys():
        for what in ("step", "rollout"):
            one, elastic = (found[name][f"seconds/{what}"][0] for name in ("one", "elastic"))
            gain[f"joined: {what} 1 shorter by"] = 1 - elastic / one
    if {"two", "elastic"} <= found.keys():
        two, elastic = found["two"], found["elastic"]
        for what, name in (("worker-seconds saved", "fleet/worker_seconds"), ("step shorter by", "seconds/step")):
            shares = [1 - b / a for a, b in zip(two[name], elastic[name], strict=True)]
            gain[f"let go: {what}, median of steps between the first and the last"] = median(shares[1:-1] or shares[1:])
            gain[f"let go: {what}, from step 2 on"] = 1 - sum(elastic[name][1:]) / sum(two[name][1:])
        gain["start-up, s"] = start_s = max(elastic["start_s"])
        gain["a worker is let go from this wait on, s"] = IDLE_S + start_s + 2 * margin_s(start_s)
        pairs = zip(elastic["seconds/step"], elastic["seconds/rollout"], strict=True)
        gain["wait from a rollout to the next, s, median"] = median(step - rollout for step, rollout in pairs)
    return gain


def main(
    *overrides: Annotated[str, "of the configuration, for all runs"],
    rollouts: Annotated[int, "per prompt"] = 42,
    steps: Annotated[int, "of elastic and two"] = 3,
    step_ms: Annotated[float, "least duration of an engine step; 0: as fast as this machine is"] = 10.0,
    only: Annotated[Sequence[str], "runs", (*WORKERS, *WHOLE)] = (*WORKERS,),
    folder: Path = ROOT / "runs/elastic",
    out: Path = ROOT / "experiments/results/elastic.json",
) -> int:
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = (str(PACED), os.environ.get("PYTHONPATH"))
    os.environ |= {"PACELINE_STEP_S": str(step_ms / 1000), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    settings = (
        *("rollout.prompts_per_step=96", "rollout.engine.threads=1", "learner.threads=1"),
        *("cluster.cpus_per_worker=1", "cluster.cpus_per_learner=1", "cluster.spot.provider=none"),
        *("observe.samples_per_step=100000", "observe.tensorboard=false"),
        *overrides,
    )
    plain = (
        "rollout.engine.max_running=32",
        "rollout.speculation.mode=off",
        "drafter.train=false",
        "data.eval=null",
        "checkpoint.every=0",
    )
    size = f"rollout.rollouts_per_prompt={rollouts}"
    of_run: dict[str, tuple[str, ...]] = dict.fromkeys(WORKERS, (f"run.steps={steps}", size, *plain))
    of_run["one"] = ("run.steps=1", size, *plain)
    of_run |= dict.fromkeys(WHOLE, ("run.steps=4", "rollout.rollouts_per_prompt=8", "eval.every=2"))
    found: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="pln", dir="/tmp", ignore_cleanup_errors=True) as short,
        Nodes(Path(short), cpus=2) as nodes,
    ):
        runs = Runs(folder, nodes, settings)

        def node(name: str) -> None:
            if name not in nodes.names:
                print(f"node {name} joins: {nodes.add(name, cpus=1)[:8]}", flush=True)

        for name in only:
            match name:
                case "elastic":
                    code = runs.run(name, *of_run[name], acts=[(0, EARLY, lambda process: node("second"))])
                case "resumed":
                    node("second")
                    acts: list[tuple[int, float, Act]] = [
                        (0, EARLY, lambda process: node("third")),
                        (2, 0.5, lambda process: process.send_signal(signal.SIGINT)),
                    ]
                    print(f"interrupted: exit code {runs.run(name, *of_run[name], acts=acts)}", flush=True)
                    code = runs.run(name, *of_run[name], "--resume")
                case _:
                    for joins in ("second", "third")[: {"one": 0, "two": 1, "three": 2}[name]]:
                        node(joins)
                    code = runs.run(name, *of_run[name])
            found[name] = runs.told(name, code)
    differs: dict[str, str | None] = {}
    for a, b in SAME:
        if {a, b} <= found.keys():
            both = min(len(found[name]["seconds/step"]) for name in (a, b))
            before, after = (first_steps(folder / name, both) for name in (b, a))
            differs[f"{a} and {b}, {both} steps"] = first_difference(before, after)
    left = [*nodes.left.processes, *nodes.left.segments]
    gain = {name: round(value, 4) for name, value in gains(found).items()}
    record = {"gain": gain, "differences": differs, "left": left, "runs": found}
    write(
        out,
        "what are workers worth that come and go?",
        record,
        settings={"of each": of_run, "of all": settings, "step_ms": step_ms},
    )
    for name, value in gain.items():
        print(f"{name}: {value:.2f}")
    print(f"differences: {differs}, left: {left}")
    return 1 if any(differs.values()) else 0


if __name__ == "__main__":
    sys.exit(command(main))
