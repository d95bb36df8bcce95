"""Spans of the timeline: joined as they arrive, exported as a Chrome trace (Perfetto, chrome://tracing).
Has no clock.
"""

import json
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from actors.spans import Joiner, Stretch
from launch.observe.journal import read
from launch.observe.journal import replace as write_file
from launch.observe.records import Span
from launch.observe.speculation import Point, traces_of

JOIN_GAP_S = 0.05


# Of spans that continue each other: by actor; same kind and step, gap at most JOIN_GAP_S. Engines report a window every
# 0.2 s, but readers need the total decode time of a worker.
SpanJoiner = Joiner[str, tuple[str, int]]


def joined(joiner: SpanJoiner, span: Span) -> Span | None:
    """Add a span. Returns the actor's previous one if this span does not continue it."""
    over = joiner.add(span.actor, (span.kind, span.step), span.start_s, span.end_s)
    return None if over is None else span_of(span.actor, over)


def span_of(actor: str, over: Stretch[tuple[str, int]]) -> Span:
    kind, step = over.label
    return Span(actor, kind, over.start_s, over.end_s, step)


def to_json(span: Span) -> dict[str, Any]:
    return {
        "actor": span.actor,
        "kind": span.kind,
        "start_s": round(span.start_s, 6),
        "end_s": round(span.end_s, 6),
        "step": span.step,
    }


def read_spans(path: Path) -> list[Span]:
    """Return the spans of a timeline.jsonl in order of their start; foreign records are left out."""
    spans = []
    for record in read(path):
        try:
            actor, kind = str(record["actor"]), str(record["kind"])
            span = Span(actor, kind, float(record["start_s"]), float(record["end_s"]), int(record["step"]))
        except (KeyError, TypeError, ValueError):
            continue
        spans.append(span)
    return sorted(spans, key=attrgetter("start_s"))


def chrome_trace(spans: Iterable[Span], traces: Iterable[Mapping[str, list[Point]]] = ()) -> dict[str, Any]:
    """Build a trace in the Trace Event Format: complete events ("X", microseconds since the first span) with one named
    track per actor. Speculation's traces add a counter per worker and drafter: the running requests that use it."""
    spans = list(spans)
    origin_s = min((span.start_s for span in spans), default=0.0)
    tracks = {actor: index for index, actor in enumerate(sorted({span.actor for span in spans}))}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": actor}}
        for actor, tid in tracks.items()
    ]
    events += [
        {
            "name": span.kind,
            "cat": span.kind,
            "ph": "X",
            "pid": 1,
            "tid": tracks[span.actor],
            "ts": round((span.start_s - origin_s) * 1e6, 1),
            "dur": round(max(span.end_s - span.start_s, 0.0) * 1e6, 1),
            "args": {"step": span.step},
        }
        for span in spans
    ]
    events += [event for trace in traces for event in _counters(trace, origin_s)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin_s": origin_s}}


def _counters(trace: Mapping[str, list[Point]], origin_s: float) -> list[dict[str, Any]]:
    drafters = sorted({drafter for points in trace.values() for _, _, drafter in points})
    return [
        {
            "name": f"{worker} running",
            "ph": "C",
            "pid": 1,
            "ts": round((at_s - origin_s) * 1e6, 1),
            "args": {name: running if name == drafter else 0 for name in drafters},
        }
        for worker, points in trace.items()
        for at_s, running, drafter in points
    ]


def write_trace(run_dir: Path) -> Path:
    """Export run_dir's timeline.jsonl and the traces of its speculation.jsonl as run_dir/trace.json."""
    path = run_dir / "trace.json"
    traces = [traces_of(record) for record in read(run_dir / "speculation.jsonl")]
    trace = chrome_trace(read_spans(run_dir / "timeline.jsonl"), traces)
    write_file(path, json.dumps(trace, separators=(",", ":")))
    return path
