"""What sampling ahead brings on the demo: pairs of runs of one configuration, with `rollout.staleness` 0, then 1.

    python -m experiments.one_step_off --model DIR [--steps 24] [--out FILE] [key=value ...]

Of two ways to use two cores: `shared`, the demo's own (two workers, and a learner that takes both cores), and `own`,
one worker and a learner of one thread, so that each has a core, as each has devices on a cluster. Compares times of the
same steps (from the third on: by then both are in their rhythm), held-out rewards, and the share of the cores that was
idle, which is what an overlap can gain at most.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from launch.config import load_config
from launch.observe.journal import read
from launch.run.train import train

CONFIG = Path(__file__).parents[1] / "examples/guess_and_check/config.yaml"
QUIET = ("checkpoint.every=0", "observe.tensorboard=false", "observe.live=false", "drafter.train=false")
LAYOUTS = {"shared": (), "own": ("rollout.workers=1", "learner.threads=1")}
NAMES = ("in_turns", "one_step_off")  # by staleness
LOOK_S = 0.1
FIRST = 3  # step that is compared
PARTS = ("step", "rollout", "reward_wait", "learn", "overlap", "publish", "sync")


def run(overrides: Sequence[str], staleness: int, folder: Path) -> dict[str, Any]:
    """One run to its end, and what it says of itself."""
    name = NAMES[staleness]
    written = [*overrides, f"rollout.staleness={staleness}", f"run.name={name}", f"run.dir={folder}"]
    config = load_config(CONFIG, written).config
    idle: list[tuple[float, float]] = []  # (Unix time, idle core seconds since the machine started)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            idle.append((time.time(), psutil.cpu_times().idle))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        if code := train(config, config_source=str(CONFIG), resume=False):
            raise SystemExit(code)
    finally:
        over.set()
        watcher.join()
    rows = read(folder / name / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "step"]
    compared = steps[FIRST - 1 : -1]  # the last one samples nothing ahead
    took_s = [row["seconds/step"] for row in compared]
    begin_s, end_s = steps[FIRST - 2]["at_s"], steps[-2]["at_s"]
    within = [(at_s, seconds) for at_s, seconds in idle if begin_s <= at_s <= end_s]
    (first_s, before), (last_s, after) = within[0], within[-1]
    return {
        "step_s": [round(seconds, 3) for seconds in took_s],
        "seconds": {
            part: round(statistics.fmean(row.get(f"seconds/{part}", 0.0) for row in compared), 3) for part in PARTS
        },
        "tokens_per_step": round(statistics.fmean(row["tokens/generated"] for row in compared)),
        "held_out": [round(row["eval/reward"], 4) for row in rows if row["kind"] == "eval"],
        "staleness": [row.get("staleness/mean", 0.0) for row in steps],
        "sampler_weight": round(statistics.fmean(row.get("sampler_correction/weight", 1.0) for row in compared), 4),
        "effective_share": round(
            statistics.fmean(row.get("sampler_correction/effective_share", 1.0) for row in compared), 4
        ),
        "idle_share": round((after - before) / (last_s - first_s) / (psutil.cpu_count() or 1), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a warm-started model; default: the demo's own warm start")
    parser.add_argument("--steps", type=int, default=24, help="of the demo's own layout; half as many of the other")
    parser.add_argument("--out", type=Path, default=Path("experiments/results/one_step_off.json"))
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    given = [*QUIET, *arguments.overrides]
    if arguments.model:
        given += [f"model.path={arguments.model}", "warmup=null"]
    result: dict[str, Any] = {"cores": psutil.cpu_count(), "overrides": [*QUIET, *arguments.overrides]}
    for layout, keys in LAYOUTS.items():
        steps = arguments.steps if layout == "shared" else arguments.steps // 2
        with TemporaryDirectory() as folder:
            pair = [run([*given, *keys, f"run.steps={steps}"], staleness, Path(folder)) for staleness in (0, 1)]
        usual, ahead = (sum(found["step_s"]) for found in pair)
        result[layout] = {
            "overrides": list(keys),
            **dict(zip(NAMES, pair, strict=True)),
            "speedup": round(usual / ahead, 3),
        }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
