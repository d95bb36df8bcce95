"""The data of the report's charts, from the files of a run folder. Reads files; has no HTML."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from launch.observe.journal import read
from launch.observe.records import PHASES, SPAN_KINDS, Span
from launch.observe.timeline import read_spans
from launch.report.drafter import drafter_data
from launch.report.speculation import speculation_data
from launch.report.summary import eval_points, step_rows
from launch.report.token_budget import token_budget_data

BREAK_SHARE = 0.05  # of the active time; a longer pause of all actors is drawn as a break
MAX_SPANS = 60_000  # more make the page slow; the shortest are left out, which the page reports
BINS = 24


def chart_data(run_dir: Path) -> dict[str, Any]:
    """Return all chart data, ready for JSON: column-wise series, evaluations, phases, lengths, timeline."""
    rows = read(run_dir / "metrics.jsonl")
    steps = step_rows(rows)
    spans, speculation = read_spans(run_dir / "timeline.jsonl"), read(run_dir / "speculation.jsonl")
    return {
        **run_series(rows),
        "evaluation": [row for row in rows if row.get("kind") == "eval"],
        "phases": _phases(steps),
        "lengths": _lengths(read(run_dir / "lengths.jsonl")),
        "timeline": _timeline(spans),
        "speculation": speculation_data(speculation),
        "token_budget": token_budget_data(steps, read(run_dir / "budget.jsonl")),
        "drafter": drafter_data(read(run_dir / "drafter.jsonl"), speculation, spans),
    }


def run_series(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return steps, every metric by step, and held-out rewards, from the rows of metrics.jsonl."""
    steps, evals = step_rows(rows), eval_points(rows)
    names = sorted({name for row in steps for name in row if "/" in name or name in _PLAIN} - {"step", "at_s"})
    return {
        "steps": [int(row["step"]) for row in steps],
        "series": {name: [_number(row.get(name)) for row in steps] for name in names},
        "evals": {"x": [step for step, _ in evals], "y": [value for _, value in evals]},
    }


_PLAIN = frozenset({"tokens_per_s", "clip_fraction", "entropy", "kl", "kl_old", "lr"})


def _phases(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return seconds per phase and step; `other` is the rest of the step."""
    columns = {name: [_number(row.get(f"seconds/{name}")) or 0.0 for row in steps] for name in PHASES}
    known = [sum(values) for values in zip(*columns.values(), strict=True)]
    whole = [_number(row.get("seconds/step")) or 0.0 for row in steps]
    columns["other"] = [max(total - part, 0.0) for total, part in zip(whole, known, strict=True)]
    return [{"name": name, "values": [round(v, 4) for v in values]} for name, values in columns.items()]


def _lengths(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return histograms of the response lengths of the first and the last step, over the same bins."""
    rows = sorted((row for row in rows if row.get("lengths")), key=lambda row: int(row["step"]))
    if not rows:
        return None
    first, last = rows[0], rows[-1]
    longest = max(*first["lengths"], *last["lengths"], 1)
    width = max(-(-longest // BINS), 1)  # whole tokens, rounded up
    edges = list(accumulate([width] * BINS, initial=0))

    def count(row: Mapping[str, Any]) -> dict[str, Any]:
        counts = [0] * BINS
        for length in row["lengths"]:
            counts[min(int(length) // width, BINS - 1)] += 1
        return {"step": int(row["step"]), "counts": counts}

    return {"edges": edges, "first": count(first), "last": count(last)}


def _timeline(spans: Sequence[Span]) -> dict[str, Any]:
    """Return spans as [actor, kind, start ms, duration ms, step]; actors in natural order, kinds in the legend's."""
    dropped = max(len(spans) - MAX_SPANS, 0)
    shortest_s = sorted(span.end_s - span.start_s for span in spans)[dropped] if dropped else 0.0
    kept = [span for span in spans if span.end_s - span.start_s >= shortest_s]
    actors = sorted({span.actor for span in kept}, key=_natural)
    seen = {span.kind for span in kept}
    kinds = [kind for kind in SPAN_KINDS if kind in seen] + sorted(seen - set(SPAN_KINDS))
    actor_index = {actor: i for i, actor in enumerate(actors)}
    kind_index = {kind: i for i, kind in enumerate(kinds)}
    origin_s = min((span.start_s for span in kept), default=0.0)
    breaks = _breaks(kept)
    rows = [
        [
            actor_index[span.actor],
            kind_index[span.kind],
            round((span.start_s - origin_s - sum(cut for at, cut in breaks if at <= span.start_s)) * 1000, 1),
            round(max(span.end_s - span.start_s, 0.0) * 1000, 1),
            span.step,
        ]
        for span in kept
    ]
    return {
        "actors": actors,
        "kinds": kinds,
        "spans": rows,
        "breaks": _drawn(breaks, origin_s),
        "left_out": len(spans) - len(kept),
        "left_out_below_ms": round(shortest_s * 1000, 2),
    }


def _breaks(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Return (end, seconds left out) of each long pause of all actors: the run was interrupted there."""
    gaps: list[tuple[float, float]] = []
    end_s: float | None = None
    for span in sorted(spans, key=attrgetter("start_s")):
        if end_s is not None and span.start_s > end_s:
            gaps.append((span.start_s, span.start_s - end_s))
        end_s = max(span.end_s, end_s or span.end_s)
    if end_s is None:
        return []
    covered_s = end_s - min(span.start_s for span in spans)
    for _, gap_s in sorted(gaps, key=itemgetter(1), reverse=True):  # what is left once the longest are out
        if gap_s <= BREAK_SHARE * (covered_s - gap_s):
            break
        covered_s -= gap_s
    shown_s = BREAK_SHARE * covered_s / 2
    return [(at_s, gap_s - shown_s) for at_s, gap_s in gaps if gap_s > BREAK_SHARE * covered_s]


def _drawn(breaks: Sequence[tuple[float, float]], origin_s: float) -> list[list[float]]:
    """Return [end on the chart's axis, left out] in ms."""
    left_out = accumulate(cut for _, cut in breaks)
    return [
        [round((at_s - origin_s - before) * 1000, 1), round(cut * 1000, 1)]
        for (at_s, cut), before in zip(breaks, left_out, strict=True)
    ]


def _natural(name: str) -> tuple[str, int]:
    """Sort key that puts rollout-2 before rollout-10."""
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or 0)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
