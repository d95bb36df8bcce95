"""The report's section that compares with another run: numbers, differing keys, and the other run's curves."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.config.document import parse_document
from launch.config.load import leaves
from launch.config.schema import render
from launch.observe.journal import read
from launch.observe.live import duration
from launch.report.collect import run_series
from launch.report.summary import REWARD_WINDOW, RunSummary, numbers, step_rows, summarise
from launch.report.tables import number_cell, text_table

NOTE = (
    "Dashed lines in the charts below are the other run's. Rewards of training are means over the first and the last "
    f"{REWARD_WINDOW} RL steps, learning's values are of the last {REWARD_WINDOW}."
)
_LEARNING = (
    *(("entropy", "Entropy, nats per token"), ("kl", "KL to the reference, nats per token")),
    *(("clip_fraction", "Clipped share of tokens"), ("grad_norm/mean", "Gradient norm")),
    *(("length/mean", "Response length, tokens"), ("groups/used", "Groups used")),
    ("rollouts/truncated_share", "Responses cut at the length limit, share"),
    ("turns/limited_share", "Episodes ended at environment.max_turns, share"),
)
_NEVER = ("run.name", "run.dir")


def against_data(run_dir: Path, other: Path) -> dict[str, Any]:
    """Return the chart data of the other run."""
    return {"name": _names(run_dir, other)[1], **run_series(read(other / "metrics.jsonl"))}


def _names(run_dir: Path, other: Path) -> tuple[str, str]:
    """Return labels of the two runs: their names, else their folders."""
    one, two = summarise(run_dir).name, summarise(other).name
    if one != two:
        return one, two
    return (run_dir.name, other.name) if run_dir.name != other.name else (str(run_dir), str(other))


def against_tables(run_dir: Path, other: Path) -> str:
    """Render both runs' numbers side by side, and the keys that differ."""
    one, two = summarise(run_dir), summarise(other)
    rows = [
        (what, number_cell(a), number_cell(b), number_cell(_difference(a, b), signed=True))
        for what, a, b in _numbers(run_dir, other, one, two)
        if a is not None or b is not None
    ]
    rows.insert(0, ("Status", one.status, two.status, ""))
    rows.append(("Time in RL steps", duration(one.wall_s), duration(two.wall_s), ""))
    names = _names(run_dir, other)
    keys = [(key, a, b) for key, a, b in differing_keys(run_dir, other)]
    configuration = text_table(("Key", *names), keys) if keys else '<div class="empty">No key differs</div>'
    table = text_table(("", *(f"{name}#" for name in names), "difference#"), rows)
    return f"{table}<h3>Configuration</h3>{configuration}"


def _numbers(
    run_dir: Path, other: Path, one: RunSummary, two: RunSummary
) -> Iterator[tuple[str, float | None, float | None]]:
    for what, name in (
        ("Held-out reward, before", "eval_first"),
        ("Held-out reward, last", "eval_last"),
        ("Held-out reward, best", "eval_best"),
        ("Train reward, first steps", "reward_first"),
        ("Train reward, last steps", "reward_last"),
        ("RL steps", "steps_done"),
        ("Tokens generated", "tokens"),
        ("Tokens per second, median step", "tokens_per_s"),
    ):
        yield what, getattr(one, name), getattr(two, name)
    yield "Seconds per RL step", _per_step(one), _per_step(two)
    mine, theirs = (step_rows(read(folder / "metrics.jsonl"))[-REWARD_WINDOW:] for folder in (run_dir, other))
    for name, what in _LEARNING:
        yield what, _mean(numbers(mine, name)), _mean(numbers(theirs, name))


def _per_step(summary: RunSummary) -> float | None:
    return summary.wall_s / summary.steps_done if summary.steps_done else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _difference(one: float | None, two: float | None) -> float | None:
    return None if one is None or two is None else one - two


def differing_keys(run_dir: Path, other: Path) -> list[tuple[str, str, str]]:
    """Return (key, value here, value there) of every differing key; "-" if a run's version lacks the key."""
    mine, theirs = _keys(run_dir), _keys(other)
    return [
        (key, mine.get(key, "-"), theirs.get(key, "-"))
        for key in sorted({*mine, *theirs})
        if mine.get(key) != theirs.get(key) and key not in _NEVER
    ]


def _keys(run_dir: Path) -> Mapping[str, str]:
    try:
        text = (run_dir / "config.yaml").read_text(encoding="utf-8")
    except OSError:
        return {}
    return {".".join(path): render(value) for path, value in leaves((), parse_document(text, "config.yaml").values)}
