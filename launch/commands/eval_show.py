"""Print the results of `paceline eval`: a model's metrics, or a run's next to those of its initial model.

Owns the tables and comparison.json. Reads the folders of evaluations, evaluates nothing.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import stdev
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.observe.journal import read, replace
from launch.report.before_after import BeforeAfter, before_after, before_after_lines, counts
from launch.report.summary import run_options

COMPARISON = "comparison.json"  # in the folder of the trained model's evaluation
_PROMPTS = "eval_prompts.jsonl"


def show_metrics(metrics: Mapping[str, float]) -> None:
    """Print a table of sets and metrics. `eval/<set>/source/<source>/<metric>` gets a line of its own."""
    cells: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        where, _, metric = name.removeprefix("eval/").rpartition("/")
        if where.startswith("master_") or metric.startswith("master_"):
            where, metric = f"full precision {where.removeprefix('master_')}".strip(), metric.removeprefix("master_")
        cells.setdefault(where, {})[metric] = value
    several = any(where and "source/" not in where for where in cells)
    table = Table("held out", box=box.SIMPLE_HEAD)
    columns = list(dict.fromkeys(metric for row in cells.values() for metric in row))
    for metric in columns:
        table.add_column(metric, justify="right", no_wrap=True)
    for where, row in cells.items():
        values = (f"{row[metric]:.4g}" if metric in row else "-" for metric in columns)
        table.add_row(where or ("mean of sets" if several else "all"), *values)
    # Into a file or a pipe, lines stay whole, however many metrics there are.
    Console(width=None if sys.stdout.isatty() else 24 + 16 * len(columns)).print(table)


def write_comparison(base: Path, trained: Path) -> dict[str, Any]:
    """Compare the evaluations in two folders, of the same prompts with the same noise. Also writes it to `trained`.

    Returns {"base" and "trained": {"model", "folder"}, "metrics": {name: {"base", "trained", "difference",
    "standard_error"}}, "prompts": launch.report.before_after.BeforeAfter as a mapping}, None for what does not exist.
    """
    before, after = (_metrics(folder) for folder in (base, trained))
    errors = standard_errors(base, trained)
    found = _before_after(base, trained)
    written = {
        "base": {"model": run_options(base, "model").get("path"), "folder": str(base)},
        "trained": {"model": run_options(trained, "model").get("path"), "folder": str(trained)},
        "metrics": {
            name: {
                "base": before.get(name),
                "trained": after.get(name),
                "difference": after[name] - before[name] if name in before and name in after else None,
                "standard_error": errors.get(name),
            }
            for name in dict.fromkeys((*before, *after))
        },
        "prompts": None if found is None else asdict(found),
    }
    replace(trained / COMPARISON, json.dumps(written, indent=1) + "\n")
    return written


def show_comparison(base: Path, trained: Path, console: Console | None = None) -> None:
    """Print `write_comparison` as a table, and three prompts with a response of each model."""
    console = console or Console(width=None if sys.stdout.isatty() else 100)
    table = Table("held out", box=box.SIMPLE_HEAD)
    for head in ("base", "trained", "difference", "standard error"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, row in write_comparison(base, trained)["metrics"].items():
        cells = ("" if value is None else f"{value:{'+' * (key == 'difference')}.4g}" for key, value in row.items())
        table.add_row(name.removeprefix("eval/"), *cells)
    console.print(table)
    found = _before_after(base, trained)
    if found is not None:
        console.print(Text(f"base and trained: {counts(found)}"))
        for line in before_after_lines(found, console.width, ("base", "trained")):
            console.print(line, soft_wrap=True)


def standard_errors(base: Path, trained: Path) -> dict[str, float]:
    """Return the standard errors of the differences of mean rewards, by metric (`eval/reward`; with several sets
    `eval/SET/reward`). Each is the standard deviation of the per-prompt differences over the square root of their
    number. A single prompt has none."""
    before, after = (
        {(row.get("set"), row.get("uid")): row.get("reward") for row in read(folder / _PROMPTS)}
        for folder in (base, trained)
    )
    differences: dict[str, list[float]] = {}
    for key, reward in before.items():
        if reward is not None and (now := after.get(key)) is not None:
            differences.setdefault(str(key[0]), []).append(now - reward)
    return {
        "eval/reward" if len(differences) == 1 else f"eval/{name}/reward": stdev(values) / math.sqrt(len(values))
        for name, values in differences.items()
        if len(values) > 1
    }


def _metrics(folder: Path) -> dict[str, float]:
    """Return the metrics of the folder's last evaluation."""
    rows = [row for row in read(folder / "metrics.jsonl") if row.get("kind") == "eval"]
    return {name: value for name, value in rows[-1].items() if name.startswith("eval/")} if rows else {}


def _before_after(base: Path, trained: Path) -> BeforeAfter | None:
    """Compare as if the base model were that of step 0, and the trained one that of step 1."""
    samples, prompts = (
        [row | {"step": step} for step, folder in enumerate((base, trained)) for row in read(folder / name)]
        for name in ("eval_samples.jsonl", _PROMPTS)
    )
    return before_after(samples, prompts)
