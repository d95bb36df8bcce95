"""Does the demo learn from low-bit rollouts? `python -m benchmarks.low_bit_learning [--jobs 2] [KEY=VALUE ...]`

Owns `benchmarks/results/low_bit_learning.{json,md,svg}`: paired runs of the demo, one per arm and seed, each through
the program as a user would start it. All arms of a seed begin with the same warm start (made once, in full precision,
kept by content in `warm_starts` of --run-dir), see the same prompts in the same order and have the same budget of RL
steps, threads and workers. The metric is the held-out reward of the example's README at the last step, never at the
best one; nothing is selected. Runs go seed by seed, so what is cut short has every arm. A run that is in the record is
not made again: the same command resumes. `--table-only` writes the table and the figure.

Fixed before the first run (22 November 2026):

- A run *fails* if it does not finish (an exit code, a number that is not finite, the time limit), or if its final
  held-out reward, in the precision it rolled out with, is below that of its seed's full-precision warm start.
- Expectation: at W8 and W4 the demo loses nothing (the divergence between engine and learner is 3e-4 nats per token),
  aligned or not: differences to fp32 within two standard errors. At W3 or W2, which nobody would choose, an unaligned
  learner loses or fails and an aligned one does not. TBPO adds nothing measurable: responses have at most 200 tokens.
- TBPO's bounds are the paper's times 10, by the rule of docs/learning.md: an update moves a response so much farther.
- Added before the runs of more than one seed, when fp32 and unaligned runs of seed 0 had been looked at: 24 steps lose
  nothing even at W2 (0.73 beside 0.77), so the failure is provoked by length alone, the demo's configuration for 72
  steps ("long"), where that seed's unaligned run at W2 fell from 0.77 to 0.2. No aligned run had been looked at.
"""

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

from benchmarks.figures import Line, Panel, draw
from benchmarks.harness import DEMO, RESULTS, ROOT, attempt, command, load, machine, markdown, write
from launch.observe.journal import read

Run = dict[str, Any]

FIXED = (
    "rollout.workers=1",
    "rollout.engine.threads=1",
    "rollout.speculation.mode=off",  # no token depends on it
    "drafter.train=false",
    "learner.threads=1",
    "checkpoint.every=0",
)
UNALIGNED = "learner.quantization=none"
TBPO = ("objective.name=tbpo", "objective.clip_high=4e-3", "objective.band_low=3e-3", "objective.band_high=7e-3")
FORMATS = ("w8a8", "w4a8", "w3a8", "w2a8")
BASE = "fp32"
MASTERS = "eval/master_reward"  # of an arm with low-bit rollouts
LONG = ("run.steps=72", "eval.every=24", "checkpoint.best=false")
# What matters most comes first.
ARMS: dict[str, tuple[str, ...]] = {
    BASE: (),
    "w8a8 aligned": ("rollout.quantization=w8a8",),
    "w8a8 unaligned": ("rollout.quantization=w8a8", UNALIGNED),
    f"{BASE} long": LONG,
    "w2a8 unaligned long": ("rollout.quantization=w2a8", UNALIGNED, *LONG),
    "w2a8 aligned long": ("rollout.quantization=w2a8", *LONG),
    "w2a8 aligned tbpo long": ("rollout.quantization=w2a8", *TBPO, *LONG),
    "w8a8 aligned tbpo": ("rollout.quantization=w8a8", *TBPO),
    "w4a8 aligned": ("rollout.quantization=w4a8",),
    "w4a8 unaligned": ("rollout.quantization=w4a8", UNALIGNED),
    "w3a8 unaligned long": ("rollout.quantization=w3a8", UNALIGNED, *LONG),
    "w3a8 aligned long": ("rollout.quantization=w3a8", *LONG),
    "w2a8 unaligned tbpo long": ("rollout.quantization=w2a8", UNALIGNED, *TBPO, *LONG),
    "w2a8 aligned": ("rollout.quantization=w2a8",),
    "w2a8 unaligned": ("rollout.quantization=w2a8", UNALIGNED),
    f"{BASE} tbpo": TBPO,
}
COMPARED = [
    (f"{form} {one}{length}", f"{form} {other}{length}")
    for length in ("", " long")
    for form in FORMATS
    for one, other in (("aligned", "unaligned"), ("aligned tbpo", "aligned"), ("unaligned tbpo", "unaligned"))
]
# QaRL, Table 1: average score in distribution; its unaligned and aligned runs roll out in W4A16, the aligned with TBPO.
PAPER = {
    "Qwen2.5-1.5B-Math": (34.5, 29.3, 33.9),
    "Qwen2.5-7B-Math": (43.3, 40.9, 43.5),
    "Qwen3-8B-Base": (51.8, 43.9, 48.9),
    "Qwen3-30B-A3B-Base": (52.1, 45.7, 51.2),
}
CURVES = (
    "reward/mean", "length/mean", "rollouts/truncated_share", "tokens/generated", "entropy", "grad_norm/mean",
    "logprob_gap/mean", "logprob_gap/max", "logprob_gap/k3", "kl_old", "ratio/token_max", "ratio/sequence_max",
    "ratio/sequence_min", "ratio/sequence_distance", "clip_fraction", "clip_fraction/high", "clip_fraction/low",
    "clip_fraction/dual", "clip_fraction/band_low", "clip_fraction/band_high", "sampler_correction/weight",
    "sampler_correction/truncated", "sampler_correction/raised",
)  # fmt: skip


def words_of(arm: str, seed: int, run_dir: Path, config: Path, overrides: Sequence[str]) -> list[str]:
    """The command of a run: what differs between the arms of a seed is its name and its arm's keys."""
    which = (f"run.seed={seed}", f"run.name={name_of(arm, seed)}", f"run.dir={run_dir}")
    return [sys.executable, "-m", "launch", "train", str(config), *which, *FIXED, *ARMS[arm], *overrides]


def name_of(arm: str, seed: int) -> str:
    return f"{arm.replace(' ', '-')}-{seed}"


def run(arm: str, seed: int, run_dir: Path, config: Path, overrides: Sequence[str], timeout_s: float) -> Run:
    run_dir.mkdir(parents=True, exist_ok=True)
    name = name_of(arm, seed)
    outcome = attempt(words_of(arm, seed, run_dir, config, overrides), run_dir / f"{name}.log", timeout_s)
    found: Run = {"arm": arm, "seed": seed, "exit_code": outcome.code, "wall_s": outcome.seconds}
    found["commit"] = machine()["commit"]
    if outcome.code != 0:
        return found | {"tail": outcome.tail}
    return found | summarise(read(run_dir / name / "metrics.jsonl"))


def summarise(records: Sequence[Mapping[str, Any]]) -> Run:
    """All that was evaluated before the first and after the last RL step, and the curves of `CURVES` as text.

    Raises ValueError if either evaluation is missing.
    """
    evaluations = sorted((r for r in records if r["kind"] == "eval"), key=lambda r: r["step"])
    steps = [r for r in records if r["kind"] == "step"]
    if not steps or [evaluations[i]["step"] for i in (0, -1) if evaluations] != [0, steps[-1]["step"]]:
        raise ValueError("held-out rewards before the first and after the last RL step are needed")
    first, last = (
        {name: round(r[name], 5) for name in r if name.startswith("eval/") and r[name] is not None}
        for r in (evaluations[0], evaluations[-1])
    )
    curves = {name: " ".join(f"{s[name]:.4g}" for s in steps) for name in CURVES if name in steps[0]}
    tokens = round(sum(s["tokens/generated"] for s in steps))
    held_out = " ".join(f"{r['step']}:{r['eval/reward']:.4f}" for r in evaluations)
    found = {"first": first, "last": last, "held_out": held_out, "steps": len(steps), "tokens": tokens}
    return found | {"curves": curves}


# What became of them.


def base_of(arm: str) -> str:
    """The arm that this one is compared with: full precision, as many steps."""
    return f"{BASE} long" if arm.endswith(" long") else BASE


def failed(one: Run, base: Run | None) -> bool:
    """The rule above; `base`: a run of the same seed in full precision: its first evaluation is the warm start's."""
    if one["exit_code"] != 0:
        return True
    return base is not None and base["exit_code"] == 0 and after(one) < base["first"]["eval/reward"]


def after(one: Run) -> float:
    return float(one["last"]["eval/reward"])


def curve(one: Run, name: str) -> list[float]:
    return [float(value) for value in one["curves"].get(name, "").split()]


def mean_and_error(values: Sequence[float]) -> str:
    """`+0.012 +- 0.020`, the second the standard error."""
    if not values:
        return "-"
    error = f" +- {stdev(values) / sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):+.3f}{error}"


def by_arm(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    return {arm: found for arm in ARMS if (found := {r["seed"]: r for r in runs if r["arm"] == arm})}


def paired(found: Mapping[int, Run], against: Mapping[int, Run]) -> list[float]:
    """Differences of final rewards, by seed; only of runs that finished."""
    good = [s for s in found if s in against and found[s]["exit_code"] == against[s]["exit_code"] == 0]
    return [after(found[s]) - after(against[s]) for s in sorted(good)]


def table(runs: Sequence[Run], of: Mapping[str, Any]) -> str:
    """Markdown."""
    arms = by_arm(runs)
    bases = {arm: arms.get(base_of(arm), {}) for arm in arms}
    head = (
        "arm | seeds | held-out before | after | less fp32 of as many steps | failed | after, masters | log-prob gap | "
        "its k3 | KL(old, new) | entropy, last step | clipped | largest token ratio | tokens"
    )
    rows = []
    for arm, found in arms.items():
        good = [r for r in found.values() if r["exit_code"] == 0]
        failures = sum(failed(r, bases[arm].get(seed)) for seed, r in found.items())

        def mean(name: str, good: Sequence[Run] = good) -> float:
            return fmean(fmean(curve(r, name)) for r in good)

        if not good:
            rows.append(f"{arm} | {len(found)} | {'- | ' * 3}{failures} | {'- | ' * 7}-")
            continue
        masters = [r["last"][MASTERS] for r in good if MASTERS in r["last"]]
        to_base = mean_and_error(paired(found, bases[arm])) if arm != base_of(arm) else "-"
        rows.append(
            f"{arm} | {len(found)} | {fmean(r['first']['eval/reward'] for r in good):.3f} | "
            f"{fmean(map(after, good)):.3f} | {to_base} | {failures} | {f'{fmean(masters):.3f}' if masters else '-'} | "
            f"{mean('logprob_gap/mean'):.1e} | {mean('logprob_gap/k3'):.1e} | {mean('kl_old'):.1e} | "
            f"{fmean(curve(r, 'entropy')[-1] for r in good):.3f} | {mean('clip_fraction'):.3f} | "
            f"{max(max(curve(r, 'ratio/token_max')) for r in good):.2f} | {fmean(r['tokens'] for r in good):,.0f}"
        )
    pairs = [
        f"{one} less {other} | {len(less)} | {mean_and_error(less)} | {sum(d > 0 for d in less)}"
        for one, other in COMPARED
        if (less := paired(arms.get(one, {}), arms.get(other, {})))
    ]
    beside = [" | ".join([f"paper: {model}", *map(str, scores), "-"]) for model, scores in PAPER.items()]
    for form, length in product(FORMATS, ("", " long")):
        ours = (f"{BASE}{length}", *(f"{form} {kind}{length}" for kind in ("unaligned", "aligned tbpo", "aligned")))
        if any(arm in arms for arm in ours[1:]):
            steps = "72 steps" if length else "24 steps"
            beside.append(" | ".join([f"the demo, {form}, {steps}", *(_mean_after(arms.get(arm, {})) for arm in ours)]))
    seeds = sorted({r["seed"] for r in runs})
    each = [
        f"{arm} | " + " | ".join(_final(found.get(seed), bases[arm].get(seed)) for seed in seeds)
        for arm, found in arms.items()
    ]
    first = {r["seed"]: r["first"]["eval/reward"] for r in runs if r["arm"] == base_of(r["arm"]) and "first" in r}
    warm = [f"{first[seed]:.3f}" if seed in first else "-" for seed in seeds]
    return (
        "# The demo from low-bit rollouts\n\n"
        "Held-out reward at T = 1 as fixed in `examples/guess_and_check/README.md`, by the engine of the arm's own "
        "precision, after the last RL step. +-: standard error over seeds. Gap, KL and clipped: means over RL steps. "
        "Masters: the same weights evaluated in full precision. Failed: not finished, or below the full-precision warm "
        "start of the same seed, as fixed beforehand. Written "
        "by `python -m benchmarks.low_bit_learning`.\n\n"
        f"{markdown(head, rows)}\n\n"
        f"{markdown('paired by seed | seeds | difference of final rewards | seeds above 0', pairs)}\n\n"
        "Beside the paper (QaRL, Table 1: scores in percent, rollouts in W4A16, full precision is bfloat16):\n\n"
        f"{markdown('final | full precision | unaligned | aligned, TBPO | aligned', beside)}\n\n"
        "Final rewards by seed; * failed:\n\n"
        f"{markdown(' | '.join(['arm', *map(str, seeds)]), [' | '.join(['warm start', *warm]), *each])}\n\n"
        f"{of['cores']} cores, {of['cpu']}; "
        f"{', '.join(f'{package} {version}' for package, version in of['versions'].items())}.\n"
    )


def _mean_after(found: Mapping[int, Run]) -> str:
    good = [after(r) for r in found.values() if r["exit_code"] == 0]
    return f"{fmean(good):.3f}" if good else "-"


def _final(one: Run | None, base: Run | None) -> str:
    if one is None:
        return "-"
    mark = "*" if failed(one, base) else ""
    return (f"{after(one):.3f}" if one["exit_code"] == 0 else "") + mark


def figure(runs: Sequence[Run], out: Path) -> None:
    """Rewards, log-prob gaps and entropies by RL step, means over seeds: a row of panels for each."""
    arms = {arm: [r for r in found.values() if r["exit_code"] == 0] for arm, found in by_arm(runs).items()}
    panels = []
    for name, label, log in (
        ("reward/mean", "reward of the rollouts", False),
        ("logprob_gap/mean", "log-prob gap, engine to learner", True),
        ("entropy", "entropy, nats per token", False),
    ):
        for form in FORMATS:
            long = f"{form} aligned long" in arms
            lines = [
                Line(arm.removeprefix(f"{form} ").removesuffix(" long"), by_step(curves))
                for arm, found in arms.items()
                if arm.startswith((BASE, form)) and arm.endswith(" long") == long and "fp32 tbpo" not in arm
                if (curves := [values for r in found if (values := curve(r, name))])
            ]
            if len(lines) > 1:
                panels.append(Panel(title=form, lines=lines, x_label="RL step", y_label=label, log_y=log))
    if panels:
        draw(out, panels, columns=len(panels) // 3)


def by_step(curves: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    return [(float(step), fmean(values)) for step, values in enumerate(zip(*curves, strict=True), 1)]


def main(
    *overrides: Annotated[str, "KEY=VALUE of the configuration, for all arms"],
    arms: Annotated[Sequence[str], "arms, in this order", tuple(ARMS)] = tuple(ARMS),
    seeds: Sequence[int] = tuple(range(10)),
    jobs: Annotated[int, "runs at a time, of one thread each"] = 1,
    config: Path = DEMO / "config.yaml",
    run_dir: Annotated[Path, "warm starts are kept here"] = ROOT / "runs/low_bit_learning",
    timeout_s: Annotated[float, "limit of one run, its warm start included"] = 900.0,
    table_only: bool = False,
    out: Path = RESULTS / "low_bit_learning.json",
) -> None:
    settings: dict[str, Any] = {"fixed": list(FIXED), "overrides": list(overrides)}
    kept: dict[str, Any] = load(out) if out.is_file() else {}
    runs: list[Run] = kept.get("runs", [])
    if table_only:
        report(runs, kept["machine"], out)
        return
    if kept.get("settings", settings) != settings:
        raise SystemExit(f"{out} holds runs of other settings, {kept['settings']}: give another --out")
    lock = threading.Lock()

    def do(arm: str, seed: int) -> None:
        found = run(arm, seed, run_dir.resolve(), config, overrides, timeout_s)
        reward = f"{after(found):.3f}" if found["exit_code"] == 0 else f"exit code {found['exit_code']}"
        with lock:
            runs.append(found)
            runs.sort(key=lambda r: (r["seed"], list(ARMS).index(r["arm"])))
            print(f"{time.strftime('%H:%M:%S')} {arm}, seed {seed}: {reward} in {found['wall_s']:.0f} s", flush=True)
            write(out, "does the demo learn from low-bit rollouts?", {"runs": runs}, settings=settings)

    there = {(r["arm"], r["seed"]) for r in runs}
    with ThreadPoolExecutor(jobs) as pool:
        wanted = [(arm, seed) for seed in seeds for arm in arms if (arm, seed) not in there]
        for done in [pool.submit(do, arm, seed) for arm, seed in wanted]:
            done.result()
    report(runs, machine(), out)


def report(runs: Sequence[Run], of: Mapping[str, Any], out: Path) -> None:
    """The table and the figure beside the record."""
    out.with_suffix(".md").write_text(table(runs, of), encoding="utf-8")
    figure(runs, out.with_suffix(".svg"))
    print(table(runs, of))


if __name__ == "__main__":
    command(main, timed=False)
