"""The demo on several seeds: `python -m benchmarks.seeds [--seeds 0 1 2 3 4] [KEY=VALUE ...]`.

Owns the table `benchmarks/results/demo_seeds.{json,md}`: held-out reward before and after RL, its spread over prompts,
and the time of each run, warm start included. The metric is the one the example fixes in its README; nothing is
selected: every seed that was asked for is in the table. Each run goes through the program as a user would start it.
"""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

from benchmarks.harness import DEMO, RESULTS, ROOT, command, machine, markdown, write
from launch.observe.journal import read

GOAL_POINTS = 0.10


@dataclass(frozen=True, slots=True)
class SeedResult:
    """Rewards are means over held-out prompts; spreads are standard deviations of the prompts' means."""

    seed: int
    before: float
    after: float
    spread_before: float
    spread_after: float
    rl_steps: int
    tokens: float  # generated in all of them
    tokens_per_s: float  # median over RL steps
    rl_s: float  # sum of the RL steps
    wall_s: float  # the whole command, from start to exit

    @property
    def gain(self) -> float:
        return self.after - self.before


def run_seed(
    seed: int, config: Path, run_dir: Path, overrides: Sequence[str], timeout_s: float, name: str = "seed"
) -> SeedResult:
    """Run the program once, as `name`-`seed`. Raises CalledProcessError or TimeoutExpired; its output goes to ours."""
    name = f"{name}-{seed}"
    command = [sys.executable, "-m", "launch", "train", str(config), f"run.seed={seed}", f"run.name={name}"]
    began_s = time.monotonic()
    subprocess.run([*command, f"run.dir={run_dir}", *overrides], cwd=ROOT, check=True, timeout=timeout_s)
    wall_s = time.monotonic() - began_s
    return summarise(seed, read(run_dir / name / "metrics.jsonl"), wall_s)


def summarise(seed: int, records: list[dict[str, Any]], wall_s: float) -> SeedResult:
    """Raises ValueError if the run was not evaluated before and after RL."""
    evaluations = sorted((r for r in records if r["kind"] == "eval"), key=lambda r: r["step"])
    steps = [r for r in records if r["kind"] == "step"]
    if not steps or [evaluations[i]["step"] for i in (0, -1) if evaluations] != [0, steps[-1]["step"]]:
        raise ValueError(f"seed {seed}: held-out rewards before the first and after the last RL step are needed")
    first, last = evaluations[0], evaluations[-1]
    return SeedResult(
        seed=seed,
        before=first["eval/reward"],
        after=last["eval/reward"],
        spread_before=first["eval/prompt_std"],
        spread_after=last["eval/prompt_std"],
        rl_steps=len(steps),
        tokens=sum(r["tokens/generated"] for r in steps),
        tokens_per_s=median(r["tokens_per_s"] for r in steps),
        rl_s=sum(r["seconds/step"] for r in steps),
        wall_s=wall_s,
    )


def table(results: Sequence[SeedResult], of: Mapping[str, Any]) -> str:
    """Markdown."""
    head = "seed | before | after | gain | spread before | spread after | RL steps | RL, s | tokens/s | run, s"
    rows = [
        f"{r.seed} | {r.before:.3f} | {r.after:.3f} | {r.gain:+.3f} | {r.spread_before:.2f} | {r.spread_after:.2f} | "
        f"{r.rl_steps} | {r.rl_s:.0f} | {r.tokens_per_s:,.0f} | {r.wall_s:.0f}"
        for r in results
    ]
    reached = sum(r.gain >= GOAL_POINTS for r in results)
    return (
        "# The demo on several seeds\n\n"
        "Held-out reward at T = 1 as fixed in `examples/guess_and_check/README.md`; spread: standard deviation over "
        "the held-out prompts of a prompt's mean reward. Written by `python -m benchmarks.seeds`.\n\n"
        f"{markdown(head, rows)}\n\n"
        f"At least {100 * GOAL_POINTS:.0f} points on {reached} of {len(results)} seeds; "
        f"mean {fmean(r.before for r in results):.3f} -> {fmean(r.after for r in results):.3f}. "
        f"{of['cores']} cores, {of['cpu']}.\n"
    )


def main(
    *overrides: Annotated[str, "KEY=VALUE of the configuration"],
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    config: Path = DEMO / "config.yaml",
    run_dir: Annotated[Path | None, "default: a new folder in runs/"] = None,
    timeout_s: Annotated[float, "limit of one run"] = 1800.0,
    out: Path = RESULTS / "demo_seeds.json",
) -> None:
    folder = (run_dir or ROOT / "runs" / f"seeds-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    results: list[SeedResult] = []
    for seed in seeds:
        results.append(run_seed(seed, config, folder, overrides, timeout_s))
        found = {"seeds": [asdict(r) | {"gain": r.gain} for r in results]}
        write(out, "does the demo learn, on how many seeds?", found, settings={"overrides": overrides})
        out.with_suffix(".md").write_text(table(results, machine()), encoding="utf-8")
        print(f"seed {seed}: {results[-1].before:.3f} -> {results[-1].after:.3f} in {results[-1].wall_s:.0f} s")
    print(table(results, machine()))


if __name__ == "__main__":
    command(main)
