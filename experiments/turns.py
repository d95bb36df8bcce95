"""The two examples of episodes, over seeds: `python -m experiments.turns [--seeds 0 1 2 3 4] [--tasks calculator]`.

Owns `experiments/results/turns.json` and the table in docs/results/turns.md. Each run is the example's configuration in
one process (`experiments.in_process`, the tokens and losses of the program), with a warm start of its own seed; nothing
is selected. Beside the held-out reward before and after: how long the prompts of turns are in the first RL step, and
what engines computed of them.
"""

import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, get_args

from benchmarks.harness import ROOT, command, load, machine, markdown, save
from experiments import in_process
from launch.config import load_config

Task = Literal["calculator", "text_game"]
PAGE = ROOT / "docs/results/turns.md"
_BLOCK = re.compile(r"(<!-- experiments\.turns: begin -->\n).*?(<!-- experiments\.turns: end -->)", re.DOTALL)
GOAL = 0.2


def run(task: Task, seed: int, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """One run, as a row of the record. Its data must be there (`make_data`)."""
    own = (f"run.dir={folder}", f"run.seed={seed}", "rollout.engine.threads=1", "learner.threads=1")
    config = load_config(ROOT / "examples" / task / "config.yaml", [*own, *overrides]).config
    record, begin_s = in_process.Record(), time.perf_counter()
    in_process.initial_weights(config)
    warm_s = time.perf_counter() - begin_s
    in_process.train(config, record)
    before, after = (record.evaluations[step]["eval/reward"] for step in (0, config.run.steps))
    first, last = record.steps[0].metrics, record.steps[-1].metrics
    return {
        "task": task,
        "seed": seed,
        "before": before,
        "after": after,
        "warm_s": warm_s,
        "whole_s": time.perf_counter() - begin_s,
        "rl_steps": config.run.steps,
        "turns_before": first["turns/mean"],
        "turns_after": last["turns/mean"],
        "prefilled_tokens": first["turns/prefilled_tokens"],
        "prompt_tokens": first["turns/prompt_tokens"],
        "events": [kind for kind, _ in record.events if kind.startswith("environment")],
    }


def table(record: Mapping[str, Any]) -> str:
    """Markdown: a line per task."""
    head = "example | held-out reward, by seed | mean gain | up by 0.2 | turns | prompt of a turn | of it computed | s"
    lines = []
    for task in get_args(Task):
        rows = [row for row in record["runs"] if row["task"] == task]
        if not rows:
            continue
        means = {name: fmean(row[name] for row in rows) for name, value in rows[0].items() if isinstance(value, float)}
        gains = [row["after"] - row["before"] for row in rows]
        seeds = ", ".join(f"{row['before']:.2f} to {row['after']:.2f}" for row in rows)
        lines.append(
            f"[{task}](../../examples/{task}/README.md) | {seeds} | {fmean(gains):+.3f} | "
            f"{sum(gain >= GOAL for gain in gains)} of {len(gains)} | "
            f"{means['turns_before']:.1f} to {means['turns_after']:.1f} | {means['prompt_tokens']:.1f} tokens | "
            f"{means['prefilled_tokens']:.1f} | {means['whole_s']:.0f}"
        )
    facts = record["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
    return (
        f"{markdown(head, lines)}\n\n"
        "s: a whole run in one process and one thread, warm start included. A turn's prompt, and what of it engines "
        "computed, since the rest was there: means over the turns of the first RL step.\n\n"
        f"{facts['cores']} cores of {facts['cpu']}, no GPU, beside other work; commit {facts['commit']}; {versions}. "
        "Written by `python -m experiments.turns`.\n"
    )


def main(
    *overrides: Annotated[str, "KEY=VALUE of the configuration"],
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    tasks: Annotated[Sequence[str], "examples", get_args(Task)] = get_args(Task),
    out: Path = ROOT / "experiments/results/turns.json",
) -> None:
    """Rows of other tasks and seeds stay in the record."""
    rows = load(out)["runs"] if out.exists() else []
    for seed in seeds:
        for task in tasks:
            with tempfile.TemporaryDirectory() as folder:
                row = run(task, seed, Path(folder), overrides)  # type: ignore[arg-type]
            print(json.dumps(row), flush=True)
            rows = [r for r in rows if (r["task"], r["seed"]) != (task, seed)] + [row]
            rows.sort(key=lambda r: (r["task"], r["seed"]))
            record = {"question": "do the examples of episodes learn?", "machine": machine(), "runs": rows}
            save(out, record)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_BLOCK.sub(lambda m: f"{m[1]}\n{table(record)}\n{m[2]}", page), encoding="utf-8")
    print(f"wrote {out} and {PAGE}")


if __name__ == "__main__":
    command(main, timed=False)
