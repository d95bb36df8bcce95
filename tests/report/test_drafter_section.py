"""The report's section on drafter training, and whose time it took."""

from itertools import pairwise
from pathlib import Path

import pytest

from launch.observe import Span
from launch.observe.drafter import TRAIN_SPAN, updates_of
from launch.observe.journal import read
from launch.report import render
from launch.report.drafter import MAX_POINTS, drafter_data, worker_time
from tests.report.page import Page
from tests.report.synthetic import write_run


def test_without_drafter_training_nothing_is_said_about_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "off", steps=3, planned=3, drafter=False)
    page = Page(render(run))
    assert "drafter" not in page.ids
    assert "#drafter" not in page.links
    assert "Drafter training" not in "".join(page.text)
    assert page.data["drafter"] is None


def test_drafter_training_is_shown_as_it_was_recorded(run_dir: Path) -> None:
    data = Page(render(run_dir)).data["drafter"]
    records = read(run_dir / "drafter.jsonl")
    updates = [update for record in records for update in updates_of(record)]
    assert data["curve"]["x"] == list(range(1, len(updates) + 1))
    assert data["curve"]["top3_accuracy"] == pytest.approx([update.top3_accuracy for update in updates])
    targets = [update.target_version for update in updates]
    assert data["curve"]["marks"] == [[i, b] for i, (a, b) in enumerate(pairwise(targets), start=1) if a != b]
    assert len(data["curve"]["marks"]) >= 10
    assert data["steps"] == list(range(1, 21))
    use = read(run_dir / "speculation.jsonl")[4]["strategies"]["eagle:4"]
    shares = [taken / offered for taken, offered in zip(use["taken"], use["offered"], strict=True)]
    assert [position[4] for position in data["positions"]] == shares
    assert data["accept_length"][4] == 1 + use["accepted"] / use["request_steps"]


def test_the_accuracy_curve_is_averaged_but_never_across_a_target_update() -> None:
    def update(step: int, top3: float | None, target: int, tokens: int = 10) -> list[object]:
        return [step, float(step), 1.0, 1.0, 0.0, top3, tokens, target, 1]

    count = MAX_POINTS + 300  # groups of two
    record = {
        "step": 1,
        "origin_s": 0.0,
        "updates": [update(i, 0.25 if i < 301 else 0.75, 3 + (i >= 301)) for i in range(count)]
        + [update(count, 0.5, 4, tokens=30), update(count + 1, None, 4, tokens=0)],
    }
    curve = (drafter_data([record], [], []) or {})["curve"]
    assert set(curve["top3_accuracy"][:151]) == {0.25}
    assert set(curve["top3_accuracy"][151:-2]) == {0.75}
    assert curve["top3_accuracy"][-2:] == [pytest.approx((10 * 0.75 + 30 * 0.5) / 40), None]
    assert curve["marks"] == [(301, 4)]
    assert curve["x"][150:152] == [301, 303]


def test_training_on_an_idle_worker_is_not_idle_time() -> None:
    spans = [
        Span("rollout-0", "decode", 0.0, 4.0, 1),
        Span("rollout-0", "idle", 4.0, 10.0, 1),
        Span("rollout-0", TRAIN_SPAN, 5.0, 6.0, 1),
        Span("rollout-0", TRAIN_SPAN, 5.5, 7.0, 1),
        Span("rollout-0", TRAIN_SPAN, 9.0, 11.0, 1),  # a micro-step more, until the stop is seen
        Span("rollout-1", "decode", 0.0, 9.0, 1),
        Span("rollout-1", "load_weights", 9.0, 10.0, 1),
        Span("learner-0", "train", 0.0, 10.0, 1),
    ]
    time = worker_time(spans)
    assert time["steps"] == [1]
    total = 4.0 + 3.0 + 4.5 + 9.0 + 1.0
    shares = {"busy": 13.0, "training": 4.5, "idle": 3.0, "other": 1.0}
    assert {name: time[name][0] for name in shares} == pytest.approx(
        {name: 100 * value / total for name, value in shares.items()}, abs=0.01
    )
