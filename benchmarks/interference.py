"""The cost of drafter training on idle workers, per RL step.

    python -m benchmarks.interference [--steps 60] [--out benchmarks/results/interference.json]

Three jobs of the demo run side by side and take every RL step in turn, in changing order. So each step is timed on the
same rollouts under the same conditions:

    off      no drafter is trained: no trainers, no hidden states, no coordinator
    paused   everything is there, but spot training is paused at the coordinator
    on       idle workers train

The engines decode plainly, so that the drafter's quality does not affect the times. Each worker's engine and trainer
have one thread and are pinned to one core. on / paused is the interference of the trainers, on / off the total cost.
The tokens must be the same in all three. Writes JSON and an SVG; about six minutes on two quiet cores.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated

from benchmarks.figures import Line, Panel, draw
from benchmarks.harness import DEMO, RESULTS, ROOT, command, interval, write
from benchmarks.same_losses import first_difference
from benchmarks.tools.turns import opened, pin, take_turns, wait_for_trainers
from launch.cluster.session import ray_session
from launch.config import Config, load_config
from launch.observe.journal import read

CONFIG = DEMO / "config.yaml"
JOBS = ("off", "paused", "on")
RATIOS = {"on/paused": ("on", "paused"), "on/off": ("on", "off"), "paused/off": ("paused", "off")}
GOAL = 1.05
WARM_STEPS = 2  # not counted: first batches, first sessions


def configuration(name: str, folder: Path, steps: int, extra: Sequence[str]) -> Config:
    overrides = [
        f"run.name={name}",
        f"run.dir={folder}",
        f"run.steps={steps}",
        f"drafter.train={'false' if name == 'off' else 'true'}",
        "drafter.while_it_pays=false",
        "observe={live: false, tensorboard: false, samples_per_step: 100000}",
        "data.eval=null",
        *extra,
    ]
    config = load_config(CONFIG, overrides).config
    # No override gives this: a drafter that never drafts is not worth training.
    plain = config.rollout.speculation.model_copy(update={"mode": "fixed", "strategies": ("plain",)})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"speculation": plain})})


def figure(path: Path, ratios: Mapping[str, Sequence[float]]) -> None:
    """Draw one dot per RL step and ratio, and the medians."""
    lines = [Line(name, list(enumerate(series)), ".") for name, series in ratios.items()]
    steps = (0, max(map(len, ratios.values())) - 1)
    lines += [Line(name, [(x, median(series)) for x in steps]) for name, series in ratios.items()]
    draw(path, [Panel(title="", lines=lines, x_label="RL step", y_label="ratio of times", levels=(1.0, GOAL))])


def main(
    *overrides: Annotated[str, "of the configuration, for all jobs"],
    steps: int = 60,
    folder: Path = ROOT / "runs/interference",
    out: Path = RESULTS / "interference.json",
) -> int:
    folder, total = folder.resolve(), steps + WARM_STEPS
    configs = {name: configuration(name, folder, total, overrides) for name in JOBS}
    for name in JOBS:
        for journal in (folder / name).glob("*.json*"):
            journal.unlink()
    with ExitStack() as stack:
        stack.enter_context(ray_session(address="local", cpus=32, object_store_bytes=512 * 2**20))
        jobs, clients, seen = {}, {}, set[int]()
        for count, name in enumerate(JOBS):
            jobs[name] = stack.enter_context(opened(configs[name], folder / name))
            if name != "off":
                workers = configs[name].rollout.workers.max
                clients[name] = stack.enter_context(wait_for_trainers(folder / name, count * workers))
            print(f"{name}: pinned to cores {pin(seen)}", flush=True)
        clients["paused"].pause()
        seconds = take_turns(jobs, total)
    counted = {name: series[WARM_STEPS:] for name, series in seconds.items()}
    ratios = {
        label: [a / b for a, b in zip(counted[over], counted[under], strict=True)]
        for label, (over, under) in RATIOS.items()
    }
    drafter = read(folder / "on" / "drafter.jsonl")[WARM_STEPS:]
    differs = {name: first_difference(folder / "off", folder / name) for name in JOBS[1:]}
    found = {
        "ratios": {label: interval(series) for label, series in ratios.items()},
        "goal": GOAL,
        "same_rollouts_and_losses": not any(differs.values()),
        "differences": differs,
        "steps_with_training": sum(record["micro_steps"] > 0 for record in drafter),
        "micro_steps": sum(record["micro_steps"] for record in drafter),
        "trained_s": round(sum(record["worker_s"] for record in drafter), 2),
        "paused_micro_steps": sum(r["micro_steps"] for r in read(folder / "paused" / "drafter.jsonl")),
        "median_step_s": {name: round(median(series), 4) for name, series in counted.items()},
        "seconds": {name: [round(value, 4) for value in series] for name, series in counted.items()},
    }
    settings = {"steps": steps, "warm_steps": WARM_STEPS, "config": str(CONFIG.relative_to(ROOT)), "seed": 0}
    write(out, "what does drafter training on idle workers cost an RL step?", found, settings=settings)
    figure(out.with_suffix(".svg"), ratios)
    print(json.dumps({name: found[name] for name in ("ratios", "differences", "micro_steps", "trained_s")}, indent=1))
    return 1 if any(differs.values()) else 0


if __name__ == "__main__":
    sys.exit(command(main))
