"""The demo with adapters beside the demo with all weights: `python -m experiments.lora [--seeds 0 1 2]`.

Owns `experiments/results/lora.{json,md}`: held-out reward before and after RL, bytes of one hand-over, and how far the
engine's log-probs are from the learner's, of `examples/guess_and_check/{config,lora}.yaml` by paired seeds. Each run is
the program's own in one process (`launch.local`). Seeds that a record of the same settings has are not run
again. The learning rate of lora.yaml was chosen on seed 0.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from benchmarks.harness import DEMO, ROOT, command, machine, markdown, write
from launch.config import load_config
from launch.local import RunRecord, record_run

CONFIGS = {"all weights": DEMO / "config.yaml", "adapters": DEMO / "lora.yaml"}
LARGEST_LOSS, LARGEST_SHARE = 0.03, 0.05  # of held-out reward; of the bytes handed over
NAME = "adapters beside all weights"


def run(name: str, seed: int, run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """One run, as a row of the record."""
    own = [f"run.seed={seed}", f"run.dir={run_dir}", "learner.threads=1", "rollout.engine.threads=1", "eval.every=0"]
    config = load_config(CONFIGS[name], [*own, *overrides]).config
    record = RunRecord()
    record_run(config, record)
    before, after = (record.evaluations[step]["eval/reward"] for step in (0, config.run.steps))
    metrics = [step.metrics for step in record.steps]
    return {
        "name": name,
        "seed": seed,
        "before": before,
        "after": after,
        "hand_over_bytes": metrics[-1]["weights/bytes"],
        "logprob_gap_mean": fmean(m["logprob_gap/mean"] for m in metrics),
        "logprob_gap_max": max(m["logprob_gap/max"] for m in metrics),
    }


def of(rows: Sequence[dict[str, Any]], name: str, key: str) -> list[float]:
    """By seed."""
    return [row[key] for row in sorted(rows, key=lambda row: row["seed"]) if row["name"] == name]


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of seeds that have both."""
    both = {row["seed"] for row in rows if row["name"] == "adapters"}
    rows = [row for row in rows if row["seed"] in both]
    all_weights, adapters = (of(rows, name, "after") for name in CONFIGS)
    differences = [b - a for a, b in zip(all_weights, adapters, strict=True)]
    share = fmean(of(rows, "adapters", "hand_over_bytes")) / fmean(of(rows, "all weights", "hand_over_bytes"))
    return {
        "seeds": sorted(both),
        "difference": fmean(differences),
        "differences": differences,
        "share_of_bytes": share,
        "met": fmean(differences) >= -LARGEST_LOSS and share < LARGEST_SHARE,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    found = verdict(rows)
    lines = []
    for name in CONFIGS:
        after = of(rows, name, "after")
        by_seed = ", ".join(f"{reward:.3f}" for reward in after)
        lines.append(
            f"{name} | {fmean(of(rows, name, 'before')):.3f} | {fmean(after):.3f} | {by_seed} | "
            f"{of(rows, name, 'hand_over_bytes')[0]:,.0f} | {fmean(of(rows, name, 'logprob_gap_mean')):.1e} | "
            f"{max(of(rows, name, 'logprob_gap_max')):.1e}"
        )
    here = machine()
    return (
        "# Adapters of low rank beside all weights\n\n"
        "Held-out reward of the demo at T = 1, means over the seeds; bytes of one hand-over; the gap between the "
        "engine's and the learner's log-probs. Written by `python -m experiments.lora`.\n\n"
        + markdown("trained | before | after | after, by seed | bytes handed over | gap, mean | gap, largest", lines)
        + f"\n\nHeld-out reward {found['difference']:+.3f} (by seed "
        + ", ".join(f"{difference:+.3f}" for difference in found["differences"])
        + f"; goal: at most {LARGEST_LOSS} less) at {100 * found['share_of_bytes']:.1f} % of the bytes (goal: under "
        f"{100 * LARGEST_SHARE:.0f} %): {'met' if found['met'] else '**missed**'}.\n\n"
        f"{here['cores']} cores, {here['cpu']}; {', '.join(f'{p} {v}' for p, v in here['versions'].items())}.\n"
    )


def main(
    *overrides: Annotated[str, "KEY=VALUE of both configurations"],
    seeds: Sequence[int] = (0, 1, 2),
    run_dir: Annotated[Path, "where warm starts are kept"] = ROOT / "runs",
    out: Path = ROOT / "experiments/results/lora.json",
) -> None:
    learners = {name: load_config(path).config.learner.model_dump(mode="json") for name, path in CONFIGS.items()}
    settings = {"overrides": list(overrides), "learners": learners}
    kept = json.loads(out.read_text()) if out.is_file() else {}
    rows: list[dict[str, Any]] = kept["runs"] if kept.get("settings") == settings else []
    for seed in seeds:
        for name in CONFIGS:
            if not any((row["name"], row["seed"]) == (name, seed) for row in rows):
                rows.append(run(name, seed, run_dir, overrides))
        write(out, NAME, {"runs": rows, "verdict": verdict(rows)}, settings=settings)
        out.with_suffix(".md").write_text(table(rows), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    command(main, timed=False)
