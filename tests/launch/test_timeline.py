"""Spans: joining keeps the time that each actor spent on each kind; the Perfetto export is what the format asks for."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from launch.observe import Span
from launch.observe.journal import Journal
from launch.observe.timeline import JOIN_GAP_S, SpanJoiner, chrome_trace, read_spans, span_of, to_json
from launch.observe.timeline import joined as add


def joined(spans: list[Span]) -> list[Span]:
    joiner = SpanJoiner(JOIN_GAP_S)
    out = [done for span in spans if (done := add(joiner, span)) is not None]
    return out + [span_of(actor, over) for actor, over in joiner.flush()]


def test_engine_windows_become_one_span() -> None:
    windows = [Span("rollout-0", "decode", t / 5, (t + 1) / 5, 1) for t in range(10)]
    assert joined(windows) == [Span("rollout-0", "decode", 0.0, 2.0, 1)]


def test_kind_step_actor_and_gaps_separate() -> None:
    spans = [
        Span("a", "decode", 0.0, 1.0, 1),
        Span("b", "decode", 0.5, 1.0, 1),
        Span("a", "decode", 1.0, 2.0, 2),
        Span("a", "idle", 2.0, 3.0, 2),
        Span("a", "idle", 3.0 + 2 * JOIN_GAP_S, 4.0, 2),
    ]
    assert sorted(joined(spans), key=lambda s: (s.actor, s.start_s)) == sorted(
        spans, key=lambda s: (s.actor, s.start_s)
    )


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["decode", "idle"]), st.integers(1, 2), st.integers(1, 9)),
        max_size=40,
    )
)
def test_joining_adjacent_spans_keeps_all_time(parts: list[tuple[str, str, int, int]]) -> None:
    clocks: dict[str, int] = {}
    spans = []
    for actor, kind, step, length in parts:
        start = clocks.get(actor, 0)
        clocks[actor] = start + length
        spans.append(Span(actor, kind, float(start), float(start + length), step))

    def total(chosen: list[Span]) -> dict[tuple[str, str, int], float]:
        sums: dict[tuple[str, str, int], float] = {}
        for s in chosen:
            sums[s.actor, s.kind, s.step] = sums.get((s.actor, s.kind, s.step), 0.0) + s.end_s - s.start_s
        return sums

    assert total(joined(spans)) == total(spans)


def test_chrome_trace() -> None:
    trace = chrome_trace([Span("b", "decode", 100.5, 101.0, 3), Span("a", "train", 100.0, 100.25, 3)])
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {0: "a", 1: "b"}
    complete = [(e["name"], e["tid"], e["ts"], e["dur"], e["args"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert complete == [("decode", 1, 500_000.0, 500_000.0, {"step": 3}), ("train", 0, 0.0, 250_000.0, {"step": 3})]
    assert chrome_trace([])["traceEvents"] == []


def test_reading_skips_foreign_records(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    journal = Journal(path)
    journal.write(to_json(Span("a", "idle", 2.0, 3.0, 1)))
    journal.write({"actor": "a"})
    journal.write(to_json(Span("a", "decode", 1.0, 2.0, 1)))
    journal.close()
    assert [span.kind for span in read_spans(path)] == ["decode", "idle"]


def test_running_requests_are_a_counter_by_drafter() -> None:
    traces = [{"rollout-0": [(10.0, 8, "plain"), (11.0, 3, "suffix"), (12.0, 0, "suffix")]}]
    events = chrome_trace([Span("rollout-0", "decode", 10.0, 12.0, 1)], traces)["traceEvents"]
    assert [(e["ts"], e["args"]) for e in events if e["ph"] == "C"] == [
        (0.0, {"plain": 8, "suffix": 0}),
        (1e6, {"plain": 0, "suffix": 3}),
        (2e6, {"plain": 0, "suffix": 0}),
    ]
