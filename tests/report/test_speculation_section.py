"""The report's section on speculation: what was recorded, by drafter, position and reason."""

from pathlib import Path

import pytest

from contracts.rollout import StrategyUse
from launch.observe import Observer, SpeculationMeter, StepRecord
from launch.observe.journal import read
from launch.report import render
from launch.report.collect import chart_data
from launch.report.speculation import BINS
from tests.report.page import Page, window
from tests.report.synthetic import config, write_run


def test_running_requests_keep_their_area_by_drafter(tmp_path: Path) -> None:
    """Request-seconds of each drafter, whatever the bins; first, middle and last RL step."""
    with Observer(tmp_path, config(tmp_path, steps=9)) as observer:
        for step in range(1, 6):
            meter = SpeculationMeter()
            use = StrategyUse(
                strategy="suffix:2",
                engine_steps=1,
                request_steps=1,
                drafted=1,
                accepted=1,
                seconds=1.0,
                draft_s=0.0,
                saved_s=0.5,
            )
            meter.window("a", window(use, (10.0, 4, "none"), (10.5, 2, "suffix"), (11.3, 1, "none"), (12.0, 0, "none")))
            meter.window("b", window(use, (10.1, 7, "suffix"), (13.0, 0, "none")))
            observer.step(StepRecord(step=step, metrics={}, seconds={"step": 1.0}, speculation=meter.take()))
    data = chart_data(tmp_path)["speculation"]
    assert [chart["step"] for chart in data["running"]] == [1, 3, 5]
    for chart in data["running"]:
        assert chart["width_s"] == pytest.approx(3.0 / BINS)
        areas = {name: sum(means) * chart["width_s"] for name, means in chart["running"].items()}
        assert areas == pytest.approx({"plain": 4 * 0.5 + 0.7, "suffix": 2 * 0.8 + 7 * 2.9}, rel=1e-2)
        assert max(chart["running"]["suffix"]) == 9.0
    assert data["saved_s"] == {"suffix": [1.0, 2.0, 3.0, 4.0, 5.0]}
    assert data["positions"] == {"suffix": []}


@pytest.mark.parametrize(
    ("saved_s", "shown"),
    [
        (-33.95, '<b><span class="down">-67.9 s</span></b><span class="more">decoding took longer, accept length'),
        (33.95, '<b>67.9 s</b><span class="more">saved, accept length'),
    ],
)
def test_lost_seconds_are_negative_and_of_the_colour_of_bad(tmp_path: Path, saved_s: float, shown: str) -> None:
    with Observer(tmp_path, config(tmp_path, steps=9)) as observer:
        for step in (1, 2):
            meter = SpeculationMeter()
            use = StrategyUse(
                strategy="suffix:2",
                engine_steps=1,
                request_steps=1,
                drafted=1,
                accepted=1,
                seconds=100.0,
                draft_s=0.0,
                saved_s=saved_s,
            )
            meter.window("a", window(use, (10.0, 4, "suffix"), (110.0, 0, "none")))
            observer.step(StepRecord(step=step, metrics={}, seconds={"step": 101.0}, speculation=meter.take()))
    assert shown in render(tmp_path)


def test_speculation_is_shown_as_it_was_recorded(run_dir: Path) -> None:
    data = Page(render(run_dir)).data["speculation"]
    records = read(run_dir / "speculation.jsonl")
    assert data["steps"] == [record["step"] for record in records]
    for index, record in enumerate(records):
        suffix = record["strategies"]["suffix:8"]
        assert data["acceptance"]["suffix"][index] == suffix["accepted"] / suffix["drafted"]
    shares = {row["strategy"]: row["share"] for row in data["strategies"]}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert list(shares) == ["suffix:8", "plain", "ngram:3", "eagle:4"]
    assert len(data["positions"]["suffix"]) == 8
    assert data["running"][1]["step"] == 11


def test_the_prompts_with_the_least_and_the_most_acceptance_are_named(run_dir: Path) -> None:
    page = render(run_dir)
    shown = Page(page).data["speculation"]["prompts"]
    assert [row["prompt"] for row in shown] == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11], "of twelve, five and five"
    records = read(run_dir / "speculation.jsonl")
    drafted = sum(row[1] for record in records for row in record["prompts"] if row[0] == 11)
    assert shown[-1] == {"prompt": 11, "drafted": drafted, "acceptance": pytest.approx(33 / 51)}
    assert f"{drafted:,}</td>" in page


def test_without_speculation_nothing_is_said_about_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "off", steps=3, planned=3, speculation=False)
    page = Page(render(run))
    assert "speculation" not in page.ids
    assert "#speculation" not in page.links
    assert "Speculati" not in "".join(page.text)
    assert page.data["speculation"] is None


def test_the_report_says_why_speculation_was_off_and_how_long_steps_should_have_taken(run_dir: Path) -> None:
    data = chart_data(run_dir)["speculation"]
    assert data["reasons"] == {
        "pays most": pytest.approx([0.55] * 20),
        "plain is faster": pytest.approx([0.4] * 20),
        "trial": pytest.approx([0.05] * 20),
    }
    workers = 2
    assert data["expected_s"]["plain"] == pytest.approx([workers * 0.075] * 20)
    assert data["measured_s"]["plain"] == pytest.approx([workers * 0.08] * 20)
    assert data["expected_s"]["suffix"] == [None] * 20
    assert data["predicted_error"] == pytest.approx([0.007 / 0.08] * 20)
    text = "off in 40 % of steps: plain decoding was faster (drafts predicted at 0.90x of it) 40 %"
    assert f"Whole run: speculation was {text}." in render(run_dir)


def test_nothing_of_the_report_is_wider_than_its_column(run_dir: Path) -> None:
    """The table of strategies has the page's width, not half of it, where its last columns were cut."""
    speculation = render(run_dir).partition('<section id="speculation">')[2].partition("</section>")[0]
    before, _, table = speculation.partition("<h3>Strategies")
    assert before.count("<div") == before.count("</div>")
    assert "<table>" in table
