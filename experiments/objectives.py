"""The demo with every objective: `python -m experiments.objectives [--names gspo ...] [--seeds 0 1 2] [KEY=VALUE ...]`.

Owns `experiments/results/objectives.{json,md}`: held-out reward before and after RL, tokens and seconds of RL, for each
objective and seed. One run after the other, each through the program as a user would start it, with the same warm start
(kept by content), the same learning rate and the defaults of its name; nothing is selected. A run that fails is in
the table with its exit code.
"""

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, get_args

from benchmarks.harness import DEMO, ROOT, command, machine, markdown, write
from benchmarks.seeds import run_seed
from config.objective import Name

MISSING = "- | "


def run(
    name: str, seed: int, config: Path, run_dir: Path, overrides: Sequence[str], timeout_s: float
) -> dict[str, Any]:
    """One run of the program, as a row of the record."""
    try:
        result = run_seed(seed, config, run_dir, [f"objective.name={name}", *overrides], timeout_s, name=name)
    except subprocess.CalledProcessError as error:
        return {"name": name, "seed": seed, "exit_code": error.returncode}
    return {"name": name, "exit_code": 0, **asdict(result)}


def table(rows: Sequence[dict[str, Any]], machine: Mapping[str, Any]) -> str:
    """Markdown: a line per objective, means over its seeds."""
    head = "objective | seeds | before | after | gain | gain by seed | std of after | tokens | RL, s | failed"
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        ran = [row for row in rows if row["name"] == name]
        good = [row for row in ran if row["exit_code"] == 0]
        if not good:
            lines.append(f"`{name}` | 0 | {MISSING * 7}{len(ran)}")
            continue
        before, after = (fmean(row[key] for row in good) for key in ("before", "after"))
        gains = ", ".join(f"{row['after'] - row['before']:+.3f}" for row in good)
        spread = f"{stdev(row['after'] for row in good):.3f}" if len(good) > 1 else "-"
        lines.append(
            f"`{name}` | {len(good)} | {before:.3f} | {after:.3f} | {after - before:+.3f} | {gains} | {spread} | "
            f"{fmean(row['tokens'] for row in good):,.0f} | {fmean(row['rl_s'] for row in good):.0f} | "
            f"{len(ran) - len(good)}"
        )
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    return (
        "# The demo with every objective\n\n"
        "Held-out reward at T = 1 as fixed in `examples/guess_and_check/README.md`, means over the seeds; tokens and "
        "seconds of RL, evaluations and warm start left out. Written by `python -m experiments.objectives`.\n\n"
        f"{markdown(head, lines)}\n\n{machine['cores']} cores, {machine['cpu']}; {versions}.\n"
    )


def main(
    *overrides: Annotated[str, "KEY=VALUE of the configuration"],
    names: Annotated[Sequence[str], "objectives", get_args(Name)] = get_args(Name),
    seeds: Sequence[int] = (0, 1, 2),
    config: Path = DEMO / "config.yaml",
    run_dir: Annotated[Path | None, "default: a new folder in runs/"] = None,
    timeout_s: Annotated[float, "limit of one run"] = 1800.0,
    out: Path = ROOT / "experiments/results/objectives.json",
) -> None:
    folder = (run_dir or ROOT / "runs" / f"objectives-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    rows: list[dict[str, Any]] = []
    for seed in seeds:  # seed by seed: what is cut short has every objective
        for name in names:
            rows.append(run(name, seed, config, folder, overrides, timeout_s))
            write(out, "the demo with every objective", {"runs": rows}, settings={"overrides": overrides})
            out.with_suffix(".md").write_text(table(rows, machine()), encoding="utf-8")
    print(table(rows, machine()))


if __name__ == "__main__":
    command(main, timed=False)
