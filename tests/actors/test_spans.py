"""Engine windows become a gapless, non-overlapping account of what a worker did."""

from hypothesis import given
from hypothesis import strategies as st

from contracts.rollout import EngineWindow
from launch.dispatch.spans import WorkerSpans
from tests.windows import engine_window

Row = tuple[str, str, float, float]


def window(start_s: float, end_s: float, steps: int = 1) -> EngineWindow:
    return engine_window(start_s=start_s, end_s=end_s, engine_steps=steps, decode_tokens=steps, running=steps)


def test_decode_windows_merge_and_the_rest_is_idle() -> None:
    rows: list[Row] = []
    spans = WorkerSpans("w", lambda *row: rows.append(row))
    spans.begin(10.0)
    for start in (11.0, 11.2, 11.4):
        spans.window(window(start, start + 0.2))
    spans.window(window(11.6, 12.0, steps=0))
    spans.window(window(13.0, 13.5))
    spans.other("restart", 14.0, 15.0)
    spans.end(16.0)
    assert [(kind, round(a, 6), round(b, 6)) for _, kind, a, b in rows] == [
        ("idle", 10.0, 11.0),
        ("decode", 11.0, 11.6),
        ("idle", 11.6, 13.0),
        ("decode", 13.0, 13.5),
        ("idle", 13.5, 14.0),
        ("restart", 14.0, 15.0),
        ("idle", 15.0, 16.0),
    ]


def test_outside_a_run_nothing_is_idle() -> None:
    rows: list[Row] = []
    spans = WorkerSpans("w", lambda *row: rows.append(row))
    spans.other("load_weights", 1.0, 2.0)
    spans.begin(5.0)
    spans.window(window(4.9, 5.3))  # begun before the driver's clock said so
    spans.end(5.5)
    spans.window(window(5.2, 5.4))  # late, and accounted for
    spans.begin(7.0)
    spans.end(7.5)
    assert rows == [
        ("w", "load_weights", 1.0, 2.0),
        ("w", "decode", 5.0, 5.3),
        ("w", "idle", 5.3, 5.5),
        ("w", "idle", 7.0, 7.5),
    ]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 1), st.booleans()), max_size=30))
def test_a_run_is_covered_once_but_for_gaps_of_a_tenth_of_a_second(steps: list[tuple[float, float, bool]]) -> None:
    rows: list[Row] = []
    spans = WorkerSpans("w", lambda *row: rows.append(row))
    spans.begin(100.0)
    now = 100.0
    for gap, length, decodes in steps:
        now += gap
        spans.window(window(now, now + length, steps=int(decodes)))
        now += length
    spans.end(now)
    end = 100.0
    for _, kind, start_s, end_s in rows:
        assert kind in ("decode", "idle")
        assert -1e-9 <= start_s - end <= 0.1 + 1e-9
        assert end_s >= start_s
        end = end_s
    assert now - end <= 0.1 + 1e-9
