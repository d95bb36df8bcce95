"""The data of the report's section on drafter training. Reads records and spans; has no HTML.

The accuracy curve is TLT's Figure 15, with a mark where the target changed. Acceptance by position is its Figure 16,
over RL steps instead of for two drafters.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from config.catalogue import TRAINED
from contracts.rollout import DraftCounts
from launch.observe.drafter import TRAIN_SPAN, Update, updates_of
from launch.observe.records import Span
from launch.observe.speculation import by_drafter, strategies_of

MAX_POINTS = 600  # of the accuracy curve; more micro-steps are averaged in groups, never across a target update
MAX_MARKS = 200
MAX_POSITIONS = 6
MIN_DRAFTS = 20  # drafts that must reach a position in one RL step, for its acceptance to be shown
WORKER = "rollout-"
SHARES = ("busy", "training", "idle", "other")


def drafter_data(
    records: Sequence[Mapping[str, Any]], speculation: Sequence[Mapping[str, Any]], spans: Sequence[Span]
) -> dict[str, Any] | None:
    """Return the section's data, ready for JSON; None if no drafter was trained."""
    records = sorted((record for record in records if isinstance(record.get("step"), int)), key=_step)
    if not records:
        return None
    used = {_step(r): by_drafter(strategies_of(r)).get(TRAINED) for r in speculation if isinstance(r.get("step"), int)}
    steps, recorded = sorted(used), {_step(record) for record in records}
    totals = [used[step] or DraftCounts() for step in steps]
    return {
        "curve": _curve([update for record in records for update in updates_of(record)]),
        "steps": steps,
        "accept_length": [total.accept_length for total in totals],
        "acceptance": [total.acceptance for total in totals],
        "positions": _positions(totals),
        "time": worker_time([span for span in spans if span.step in recorded]),
        "versions": _versions(records),
    }


def _curve(updates: Sequence[Update]) -> dict[str, Any]:
    """Return the curve over the run's micro-steps, counted from 1. `marks`: [last micro-step before, target version
    after]."""
    size = max(-(-len(updates) // MAX_POINTS), 1)
    columns: dict[str, list[float | None]] = {name: [] for name in ("loss", "accuracy", "top3_accuracy")}
    at: list[int] = []
    marks: list[tuple[int, int]] = []
    done = 0
    for version, of_version in groupby(updates, key=attrgetter("target_version")):
        if done:
            marks.append((done, version))
        part = list(of_version)
        for start in range(0, len(part), size):
            group = part[start : start + size]
            done += len(group)
            at.append(done)
            for name, column in columns.items():
                column.append(_mean([(getattr(update, name), update.tokens) for update in group]))
    return {"x": at, "marks": marks[:: -(-len(marks) // MAX_MARKS) or 1], **columns}


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None and weight]
    weight = sum(weight for _, weight in known)
    return round(sum(value * weight for value, weight in known) / weight, 5) if weight else None


def _positions(totals: Sequence[DraftCounts]) -> list[list[float | None]]:
    """Return [position][RL step]: the share accepted at a position, of the drafts that reach it."""
    deepest = min(max((len(total.offered) for total in totals), default=0), MAX_POSITIONS)
    return [[_at(total, position) for total in totals] for position in range(deepest)]


def _at(total: DraftCounts, position: int) -> float | None:
    if position >= len(total.offered) or total.offered[position] < MIN_DRAFTS:
        return None
    return total.taken[position] / total.offered[position]


def worker_time(spans: Sequence[Span]) -> dict[str, Any]:
    """Return shares of the rollout workers' time by RL step, in percent: SHARES of what their spans cover.

    A worker that trains is also reported idle by its engine. Training counts; the rest is idle.
    """
    seconds: defaultdict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(SHARES, 0.0))
    training = _merged_training(spans)
    for span in spans:
        if not span.actor.startswith(WORKER):
            continue
        length_s = max(span.end_s - span.start_s, 0.0)
        by_kind = seconds[span.step]
        if span.kind == "idle":
            trained_s = _overlap(training[span.actor], span)
            by_kind["idle"] += length_s - trained_s
        else:
            by_kind[{"decode": "busy", TRAIN_SPAN: "training"}.get(span.kind, "other")] += length_s
    steps = sorted(step for step, by_kind in seconds.items() if sum(by_kind.values()) > 0)
    shares = {
        name: [round(100 * seconds[step][name] / sum(seconds[step].values()), 2) for step in steps] for name in SHARES
    }
    return {"steps": steps, **shares}


def _merged_training(spans: Sequence[Span]) -> defaultdict[str, list[tuple[float, float]]]:
    """Return training intervals by actor, disjoint and in order."""
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in sorted((s for s in spans if s.kind == TRAIN_SPAN), key=attrgetter("start_s")):
        intervals = found[span.actor]
        if intervals and span.start_s <= intervals[-1][1]:
            intervals[-1] = intervals[-1][0], max(intervals[-1][1], span.end_s)
        else:
            intervals.append((span.start_s, span.end_s))
    return found


def _overlap(intervals: Sequence[tuple[float, float]], span: Span) -> float:
    return sum(max(min(end_s, span.end_s) - max(start_s, span.start_s), 0.0) for start_s, end_s in intervals)


def _versions(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the published and rolled-back versions, and how often training was preempted."""
    counts = [record.get("counts") or {} for record in records]
    levels = [record.get("levels") or {} for record in records]
    return {
        "steps": [record["step"] for record in records],
        "version": [level.get("version") for level in levels],
        "micro_steps": [record.get("micro_steps") for record in records],
        "preempted": [count.get("preempted") for count in counts],
        "rolled_back": [count.get("rolled_back") for count in counts],
        "buffer_bytes": [level.get("buffer_bytes") for level in levels],
    }


def _step(record: Mapping[str, Any]) -> int:
    return int(record["step"])
