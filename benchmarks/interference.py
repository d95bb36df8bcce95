"""What does drafter training on idle workers cost an RL step?

    python -m benchmarks.interference [--steps 60] [--out benchmarks/results/interference.json]

Three jobs of the demo live side by side and take every RL step in turn, in changing order, so that each step is timed
on the same rollouts under the same conditions:

    off      no drafter is trained: no trainers, no hidden states, no coordinator
    paused   everything is there, but spot training is paused at the coordinator
    on       idle workers train

The engines decode plainly: how good the drafter gets must not show in these times. Each worker's engine and trainer
have one thread and are pinned to one core. on / paused is the interference of the trainers, on / off the cost of all of
it. The tokens must be the same in all three. Writes JSON and an SVG; about six minutes on two quiet cores.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.machine import describe_machine, is_busy
from benchmarks.same_losses import first_difference
from benchmarks.tools.turns import interval, opened, pin, take_turns, wait_for_trainers
from launch.cluster.session import ray_session
from launch.config import Config, load_config
from launch.observe.journal import read

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples/guess_and_check/config.yaml"
RESULT = ROOT / "benchmarks/results/interference.json"
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
        "observe={live: false, tensorboard: false, samples_per_step: 100000}",
        "data.eval=null",
        *extra,
    ]
    config = load_config(CONFIG, overrides).config
    # Not to be had by an override: a drafter that never drafts is not worth training.
    plain = config.rollout.speculation.model_copy(update={"mode": "fixed", "strategies": ("plain",)})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"speculation": plain})})


def svg(ratios: Mapping[str, Sequence[float]], found: Mapping[str, Mapping[str, float]]) -> str:
    """One dot per RL step and ratio, and the medians."""
    width, height, left, top, bottom = 640, 260, 48, 16, 34
    values = [ratio for series in ratios.values() for ratio in series]
    low, high = min(0.9, *values), max(1.1, *values)
    colors = {"on/paused": "#1f6fb2", "on/off": "#d1601f", "paused/off": "#7a7a7a"}

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * (height - top - bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{height}" fill="#fff"/>'
    ]
    for value in (1.0, GOAL):
        dashes = "none" if value == 1 else "4 3"
        parts.append(
            f'<path d="M{left} {y(value):.1f}H{width - 8}" stroke="#999" stroke-dasharray="{dashes}"/>'
            f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>'
        )
    for i, (name, series) in enumerate(ratios.items()):
        for step, ratio in enumerate(series):
            x = left + 8 + step * (width - left - 24) / max(len(series) - 1, 1)
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y(ratio):.1f}" r="2.2" fill="{colors[name]}" fill-opacity="0.75"/>'
            )
        at = y(found[name]["median"])
        parts.append(f'<path d="M{left} {at:.1f}H{width - 8}" stroke="{colors[name]}" stroke-width="1.5"/>')
        text = "{}: {median:.3f} [{low:.3f}, {high:.3f}]".format(name, **found[name])
        parts.append(f'<text x="{left + 8 + 195 * i}" y="{height - 8}" fill="{colors[name]}">{text}</text>')
    return "".join(parts) + "</svg>\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/interference")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--busy", action="store_true", help="measure on a busy machine all the same")
    parser.add_argument("overrides", nargs="*", help="of the configuration, for all jobs")
    args = parser.parse_args()
    if is_busy() and not args.busy:
        sys.exit("the machine is busy: its timings would mean nothing (--busy measures all the same)")
    folder, total = args.folder.resolve(), args.steps + WARM_STEPS
    configs = {name: configuration(name, folder, total, args.overrides) for name in JOBS}
    for name in JOBS:
        for journal in (folder / name).glob("*.json*"):
            journal.unlink()
    with ExitStack() as stack:
        stack.enter_context(ray_session(address="local", cpus=32, object_store_bytes=512 * 2**20))
        jobs, clients, seen = {}, {}, set[int]()
        for count, name in enumerate(JOBS):
            jobs[name] = stack.enter_context(opened(configs[name], folder / name))
            if name != "off":
                workers = configs[name].rollout.workers
                clients[name] = stack.enter_context(wait_for_trainers(folder / name, count * workers))
            print(f"{name}: pinned to cores {pin(seen)}", flush=True)
        clients["paused"].pause()
        seconds = take_turns(jobs, total)
    counted = {name: series[WARM_STEPS:] for name, series in seconds.items()}
    ratios = {
        label: [a / b for a, b in zip(counted[over], counted[under], strict=True)]
        for label, (over, under) in RATIOS.items()
    }
    found = {label: interval(series) for label, series in ratios.items()}
    drafter = read(folder / "on" / "drafter.jsonl")[WARM_STEPS:]
    differs = {name: first_difference(folder / "off", folder / name) for name in JOBS[1:]}
    result = {
        "question": "what does drafter training on idle workers cost an RL step?",
        "machine": describe_machine(("torch", "ray")),
        "config": str(CONFIG.relative_to(ROOT)),
        "steps": args.steps,
        "ratios": found,
        "goal": GOAL,
        "same_rollouts_and_losses": differs == dict.fromkeys(differs),
        "differences": differs,
        "steps_with_training": sum(record["micro_steps"] > 0 for record in drafter),
        "micro_steps": sum(record["micro_steps"] for record in drafter),
        "trained_s": round(sum(record["worker_s"] for record in drafter), 2),
        "paused_micro_steps": sum(r["micro_steps"] for r in read(folder / "paused" / "drafter.jsonl")),
        "median_step_s": {name: round(median(series), 4) for name, series in counted.items()},
        "seconds": {name: [round(value, 4) for value in series] for name, series in counted.items()},
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    args.out.with_suffix(".svg").write_text(svg(ratios, found))
    for label, values in found.items():
        print("{:10s} {median:.3f} [{low:.3f}, {high:.3f}]".format(label, **values))
    print(f"same rollouts and losses: {result['same_rollouts_and_losses']}; {result['micro_steps']} micro-steps in "
          f"{result['steps_with_training']} of {args.steps} steps; {args.out}")  # fmt: skip
    return 0 if result["same_rollouts_and_losses"] else 1


if __name__ == "__main__":
    sys.exit(main())
