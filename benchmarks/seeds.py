"""An example on several seeds: `python -m benchmarks.seeds [--config FILE] [--seeds 0 1 2 3 4] [KEY=VALUE ...]`.

Owns the tables `benchmarks/results/demo_seeds.{json,md}` (examples/guess_and_check) and EXAMPLE_seeds of other
examples: held-out reward before and after RL, its spread over prompts, and where the time went. The metric is the one
that the example's README fixes. Nothing is selected: every requested seed is in the table. Each run uses the program as
a user would start it. `--beside KEY=VALUE [KEY=VALUE ...]` runs each seed once more with those overrides and compares
the seconds of rollouts; the two take turns to be first. The time that speculation saves in the demo:

    python -m benchmarks.seeds --config examples/smollm/config.yaml --beside rollout.speculation.mode=off \
        drafter.train=false drafter.offline=null

Without speculation nothing would use a drafter, so the other run must not train one.
"""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

from benchmarks.harness import DEMO, RESULTS, ROOT, command, machine, markdown, write
from launch.observe.journal import read
from launch.observe.records import PHASES

GOAL_POINTS = 0.10
GOALS = {"smollm": (0.2, 0.6)}  # by example: held-out reward below the first before RL, at least the second after


@dataclass(frozen=True, slots=True)
class SeedResult:
    """Rewards are means over held-out prompts; spreads are standard deviations of the prompts' means."""

    seed: int
    before: float
    after: float
    spread_before: float
    spread_after: float
    rl_steps: int
    tokens: float  # generated in all RL steps
    tokens_per_s: float  # median over RL steps
    rl_s: float  # sum of the RL steps
    wall_s: float  # the whole command, from start to exit
    phases_s: Mapping[str, float] = field(default_factory=dict)  # of the RL steps, by phase
    saved_s: float = 0.0  # by speculation, of the engines' decoding seconds, as the run itself estimates
    beside: float | None = None  # rollout seconds of the run with those overrides over this one's; None: not run

    @property
    def gain(self) -> float:
        return self.after - self.before


def run_seed(
    seed: int, config: Path, run_dir: Path, overrides: Sequence[str], timeout_s: float, name: str = "seed"
) -> SeedResult:
    """Run the program once, as `name`-`seed`. Raises CalledProcessError or TimeoutExpired. Its output goes to ours."""
    name = f"{name}-{seed}"
    command = [sys.executable, "-m", "launch", "train", str(config), f"run.seed={seed}", f"run.name={name}"]
    began_s = time.monotonic()
    subprocess.run([*command, f"run.dir={run_dir}", *overrides], cwd=ROOT, check=True, timeout=timeout_s)
    wall_s = time.monotonic() - began_s
    return summarise(seed, read(run_dir / name / "metrics.jsonl"), wall_s)


def summarise(seed: int, records: list[dict[str, Any]], wall_s: float) -> SeedResult:
    """Summarise a run. Raises ValueError if it was not evaluated before and after RL."""
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
        phases_s={phase: sum(r.get(f"seconds/{phase}", 0.0) for r in steps) for phase in PHASES},
        saved_s=sum(r.get("speculation/saved_s", 0.0) for r in steps),
    )


def table(results: Sequence[SeedResult], of: Mapping[str, Any], config: Path, beside: Sequence[str] = ()) -> str:
    """Render Markdown."""
    example = config.resolve().parent.relative_to(ROOT)
    head = (
        "seed | before | after | gain | spread before | spread after | RL steps | rollout, s | learn, s | RL, s | "
        "tokens/s | run, s | speculation saved, s" + (f" | rollouts with `{' '.join(beside)}`" if beside else "")
    )
    rows = [
        f"{r.seed} | {r.before:.3f} | {r.after:.3f} | {r.gain:+.3f} | {r.spread_before:.2f} | {r.spread_after:.2f} | "
        f"{r.rl_steps} | {r.phases_s['rollout']:.0f} | {r.phases_s['learn']:.0f} | {r.rl_s:.0f} | "
        f"{r.tokens_per_s:,.0f} | {r.wall_s:.0f} | {r.saved_s:+.1f}"
        + ("" if r.beside is None else f" | {r.beside:.2f}x")
        for r in results
    ]
    reached = sum(r.gain >= GOAL_POINTS for r in results)
    goal = ""
    if example.name in GOALS:
        start, end = GOALS[example.name]
        low, high = sum(r.before < start for r in results), sum(r.after >= end for r in results)
        goal = f"; below {start:g} before RL on {low}, at {end:g} or more after it on {high}"
    return (
        f"# {example} on several seeds\n\n"
        f"Held-out reward as fixed in `{example}/README.md`; spread: standard deviation over the held-out prompts of a "
        "prompt's mean reward; run: the whole command. Written by `python -m benchmarks.seeds`.\n\n"
        f"{markdown(head, rows)}\n\n"
        f"At least {100 * GOAL_POINTS:.0f} points on {reached} of {len(results)} seeds{goal}; "
        f"mean {fmean(r.before for r in results):.3f} -> {fmean(r.after for r in results):.3f}. "
        f"{of['cores']} cores, {of['cpu']}.\n"
    )


def with_beside(
    seed: int, config: Path, run_dir: Path, overrides: Sequence[str], timeout_s: float, beside: Sequence[str]
) -> SeedResult:
    """Run the seed, and compare its rollouts' time with that of `beside`. Odd seeds begin with the latter."""
    runs = {"seed": [*overrides], "beside": [*overrides, *beside]}
    order = reversed(runs) if seed % 2 else iter(runs)
    found = {name: run_seed(seed, config, run_dir, runs[name], timeout_s, name) for name in order}
    ratio = found["beside"].phases_s["rollout"] / found["seed"].phases_s["rollout"]
    return replace(found["seed"], beside=ratio)


def main(
    *overrides: Annotated[str, "KEY=VALUE of the configuration"],
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    config: Path = DEMO / "config.yaml",
    beside: Annotated[Sequence[str], "KEY=VALUE of a second run of each seed"] = (),
    run_dir: Annotated[Path | None, "default: a new folder in runs/"] = None,
    timeout_s: Annotated[float, "limit of one run"] = 1800.0,
    out: Annotated[Path | None, "default: in benchmarks/results, by the example's name"] = None,
) -> None:
    config = config.resolve()
    folder = (run_dir or ROOT / "runs" / f"seeds-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    written = out or RESULTS / ("demo_seeds.json" if config.parent == DEMO else f"{config.parent.name}_seeds.json")
    results: list[SeedResult] = []
    for seed in seeds:
        if beside:
            results.append(with_beside(seed, config, folder, overrides, timeout_s, beside))
        else:
            results.append(run_seed(seed, config, folder, overrides, timeout_s))
        found = {"seeds": [asdict(r) | {"gain": r.gain} for r in results]}
        settings = {"overrides": overrides, "beside": beside}
        write(written, "does the example learn, on how many seeds?", found, settings=settings)
        written.with_suffix(".md").write_text(table(results, machine(), config, beside), encoding="utf-8")
        print(f"seed {seed}: {results[-1].before:.3f} -> {results[-1].after:.3f} in {results[-1].wall_s:.0f} s")
    print(table(results, machine(), config, beside))


if __name__ == "__main__":
    command(main)
