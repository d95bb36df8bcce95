"""The report's chart of what every worker did: its order, its breaks, and what it leaves out."""

import shutil
from pathlib import Path

import pytest

from launch.observe import Observer, Span
from launch.observe.journal import Journal
from launch.observe.timeline import to_json
from launch.report import render
from launch.report.collect import chart_data
from tests.report.synthetic import config, write_run


def test_very_long_timelines_lose_their_shortest_spans_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.report.collect.MAX_SPANS", 10)
    journal = Journal(tmp_path / "timeline.jsonl")
    for i in range(30):
        journal.write(to_json(Span("a", "decode", float(i), i + 0.01 * (i + 1), 1)))
    journal.close()
    shutil.copy(tmp_path / "timeline.jsonl", tmp_path / "metrics.jsonl")
    timeline = chart_data(tmp_path)["timeline"]
    assert [span[3] for span in timeline["spans"]] == [10.0 * (i + 1) for i in range(20, 30)]
    assert (timeline["left_out"], timeline["left_out_below_ms"]) == (20, 210.0)
    assert "20 spans shorter than 210.0 ms are left out" in render(tmp_path)


def test_workers_are_in_natural_order(tmp_path: Path) -> None:
    run = write_run(tmp_path / "many", steps=1, planned=1, workers=12)
    actors = [actor for actor in chart_data(run)["timeline"]["actors"] if actor.startswith("rollout")]
    assert actors == [f"rollout-{n}" for n in range(12)]


def test_a_pause_of_everything_is_drawn_as_a_break(tmp_path: Path) -> None:
    """Ten seconds of work, an hour until it was resumed, ten more: the hour takes no room, and is named."""
    with Observer(tmp_path, config(tmp_path, steps=4)) as observer:
        for step, start_s in ((1, 100.0), (2, 105.0), (3, 3710.0), (4, 3715.0)):
            observer.span(Span("rollout-0", "decode", start_s, start_s + 5, step))
    timeline = chart_data(tmp_path)["timeline"]
    ((end_ms, cut_ms),) = timeline["breaks"]
    starts = [span[2] for span in timeline["spans"]]
    assert starts == pytest.approx([0, 5000, end_ms, end_ms + 5000])
    assert 0 < end_ms - 10_000 < 1000
    assert cut_ms + end_ms == pytest.approx(3_610_000)


def test_a_run_without_a_pause_has_no_break(run_dir: Path) -> None:
    assert chart_data(run_dir)["timeline"]["breaks"] == []
