"""The demo with every objective: `python -m experiments.objectives [--names gspo ...] [--seeds 0 1 2] [KEY=VALUE ...]`.

Owns `experiments/results/objectives.{json,md}`: held-out reward before and after RL, tokens and seconds of RL, for each
objective and seed. One run after the other, each through the program as a user would start it, with the same warm start
(kept by content), the same learning rate and the defaults of its name; nothing is selected. A run that fails is in
the table with its exit code.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, get_args

from benchmarks.machine import describe_machine
from policies.options import Name

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples/guess_and_check/config.yaml"
RESULTS = ROOT / "experiments/results"
MISSING = "-"


def run(name: str, seed: int, config: Path, run_dir: Path, overrides: list[str], timeout_s: float) -> dict[str, Any]:
    """One run of the program, as a row of the record; its output goes to ours."""
    folder = run_dir / f"{name}-seed{seed}"
    command = [sys.executable, "-m", "launch", "train", str(config), f"objective.name={name}", f"run.seed={seed}"]
    began_s = time.monotonic()
    finished = subprocess.run(
        [*command, f"run.name={folder.name}", f"run.dir={run_dir}", *overrides],
        cwd=ROOT,
        check=False,
        timeout=timeout_s,
    )
    row = {"name": name, "seed": seed, "exit_code": finished.returncode, "wall_s": time.monotonic() - began_s}
    if finished.returncode:
        return row
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return row | summarise([json.loads(line) for line in lines])


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run's metrics say; the held-out rewards are those before the first and after the last RL step."""
    evaluations = sorted((r for r in records if r["kind"] == "eval"), key=lambda r: r["step"])
    steps = [r for r in records if r["kind"] == "step"]
    last = steps[-1]
    return {
        "before": evaluations[0]["eval/reward"],
        "after": evaluations[-1]["eval/reward"],
        "rl_steps": len(steps),
        "tokens": sum(r["tokens/generated"] for r in steps),
        "rl_s": sum(r["seconds/step"] for r in steps),
        "last_step": {key: last[key] for key in ("entropy", "clip_fraction", "kl_old", "kl") if key in last},
    }


def table(rows: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    """Markdown: a line per objective, means over its seeds."""
    lines = [
        "# The demo with every objective",
        "",
        "Held-out reward at T = 1 as fixed in `examples/guess_and_check/README.md`, means over the seeds; tokens and "
        "seconds of RL, evaluations and warm start left out. Written by `python -m experiments.objectives`.",
        "",
        "| objective | seeds | before | after | gain | gain by seed | std of after | tokens | RL, s | failed |",
        "|---|---:|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row["name"] for row in rows):
        ran = [row for row in rows if row["name"] == name]
        good = [row for row in ran if row["exit_code"] == 0]
        if not good:
            lines.append(f"| `{name}` | 0 " + f"| {MISSING} " * 7 + f"| {len(ran)} |")
            continue
        before, after = (fmean(row[key] for row in good) for key in ("before", "after"))
        gains = ", ".join(f"{row['after'] - row['before']:+.3f}" for row in good)
        spread = f"{stdev(row['after'] for row in good):.3f}" if len(good) > 1 else MISSING
        lines.append(
            f"| `{name}` | {len(good)} | {before:.3f} | {after:.3f} | {after - before:+.3f} | {gains} | {spread} "
            f"| {fmean(row['tokens'] for row in good):,.0f} | {fmean(row['rl_s'] for row in good):.0f} "
            f"| {len(ran) - len(good)} |"
        )
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    return "\n".join([*lines, "", f"{machine['cores']} cores, {machine['cpu']}; {versions}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the demo with every objective and write the table.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides")
    parser.add_argument("--names", nargs="+", default=list(get_args(Name)), choices=get_args(Name))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / f"objectives-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--out", type=Path, default=RESULTS / "objectives", help="path without suffix")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="limit of one run")
    options = parser.parse_intermixed_args()
    machine = describe_machine()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:  # seed by seed: what is cut short has every objective
        for name in options.names:
            row = run(name, seed, options.config, options.run_dir.resolve(), options.overrides, options.timeout_s)
            rows.append(row)
            record = {"machine": machine, "overrides": options.overrides, "runs": rows}
            options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            options.out.with_suffix(".md").write_text(table(rows, machine), encoding="utf-8")
    print(table(rows, machine))


if __name__ == "__main__":
    main()
