"""What the report says of a token budget: rollouts per prompt, tokens, early ends, variance; and in words."""

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from launch.observe import Observer, StepRecord
from launch.observe.journal import read
from launch.report import render
from launch.report.collect import chart_data
from launch.report.page import BUDGET_CHARTS
from launch.report.summary import print_summary, summarise
from launch.report.token_budget import budget_rows
from tests.report.page import CHROMIUM, Page, drawn_by_a_browser
from tests.report.synthetic import config, write_run


def test_rollouts_per_prompt_are_drawn_as_they_were_recorded(run_dir: Path) -> None:
    rollouts = Page(render(run_dir)).data["token_budget"]["rollouts"]
    records = read(run_dir / "budget.jsonl")
    assert rollouts["x"] == [record["step"] for record in records] == list(range(1, 21))
    for index, record in enumerate(records):
        counts = np.array(record["rollouts"])
        assert (rollouts["min"][index], rollouts["max"][index]) == (counts.min(), counts.max())
        assert rollouts["mean"][index] == pytest.approx(counts.mean(), abs=1e-3)
        assert rollouts["p90"][index] == np.quantile(counts, 0.9)
    assert rollouts["max"][-1] - rollouts["min"][-1] > rollouts["max"][0] - rollouts["min"][0], "they fan out"


def test_the_variance_is_drawn_beside_uniform_counts_and_what_no_allocation_gets_below(run_dir: Path) -> None:
    data = chart_data(run_dir)
    columns = (data["series"][f"budget/{name}"] for name in ("variance", "variance_uniform", "bound"))
    variance, uniform, bound = (np.array(column) for column in columns)
    assert data["token_budget"]["variance"] == pytest.approx(variance / uniform)
    assert data["token_budget"]["least_variance"] == pytest.approx(1 - bound)


def test_the_summary_adds_up_what_was_planned_spent_and_saved(run_dir: Path) -> None:
    summary = summarise(run_dir).token_budget
    assert summary is not None
    steps = [row for row in read(run_dir / "metrics.jsonl") if row["kind"] == "step"]
    assert summary.planned_tokens == round(sum(row["budget/planned_tokens"] for row in steps))
    assert summary.budget_tokens == round(sum(row["budget/tokens"] for row in steps))
    assert summary.spent_tokens == sum(row["tokens/generated"] for row in steps)
    counts = [count for record in read(run_dir / "budget.jsonl") for count in record["rollouts"]]
    assert (summary.rollouts_min, summary.rollouts_max) == (min(counts), max(counts))
    assert summary.rollouts_mean == pytest.approx(np.mean(counts))
    variance, uniform = (sum(row[f"budget/{name}"] for row in steps) for name in ("variance", "variance_uniform"))
    assert summary.variance == pytest.approx(variance / uniform)
    assert summary.least_variance == pytest.approx(np.mean([1 - row["budget/bound"] for row in steps]))
    assert summary.saved_tokens == 700 * len(steps)
    assert summary.given_up_share == pytest.approx(0.09)
    assert summary.passed_over == 2 * len(steps)


def test_the_terminal_and_the_report_say_the_same_in_words(run_dir: Path) -> None:
    out = StringIO()
    print_summary(run_dir, console=Console(file=out, width=300))
    text = out.getvalue()
    for part in (
        " tokens (98.0 %), ",
        "rollouts a prompt (mean ",
        "0.82 of that of uniform counts at the same tokens (no allocation below 0.79), estimated",
        "60.0 % ended after their answer, 9.0 % given up, 1.0 % kept though late, about 14,000 tokens saved",
        "40 prompts passed over (11.1 % of those whose turn it was)",
    ):
        assert part in text, part
        assert part in render(run_dir), part
    assert json.loads((run_dir / "summary.json").read_text())["token_budget"]["saved_tokens"] == 14000


def test_without_a_budget_nothing_is_said_about_one(tmp_path: Path) -> None:
    page = Page(render(write_run(tmp_path / "off", steps=3, planned=3, token_budget=False)))
    assert "token_budget" not in page.ids
    assert "#token_budget" not in page.links
    assert "Token budget" not in "".join(page.text)
    assert page.data["token_budget"] is None
    assert summarise(tmp_path / "off").token_budget is None


ONE_THING = {
    "budget": (
        {
            "budget/tokens": 9.0,
            "budget/planned_tokens": 9.0,
            "budget/spent_tokens": 9.0,
            "budget/variance": 1.0,
            "budget/variance_uniform": 2.0,
        },
        [4, 2],
    ),
    "abort": ({"abort/answered_share": 0.5, "abort/surcharge": 1.0}, [2, 2]),
    "skip": ({"skip/passed_over": 1.0, "skip/share": 0.5}, []),
}


@pytest.mark.parametrize("name", ONE_THING)
def test_only_what_was_on_is_drawn(tmp_path: Path, name: str) -> None:
    metrics, counts = ONE_THING[name]
    with Observer(tmp_path, config(tmp_path, steps=2)) as observer:
        for step in (1, 2):
            record = StepRecord(step=step, metrics=metrics, seconds={"step": 1.0}, rollouts_per_prompt=counts)
            observer.step(record)
    page = Page(render(tmp_path))
    assert page.data["token_budget"]["parts"] == [name]
    drawn = {chart.removeprefix("chart-budget-") for chart in page.ids if chart.startswith("chart-budget-")}
    wanted = {chart for chart, _, names in BUDGET_CHARTS if any(metric in metrics for metric in names)}
    assert drawn == wanted | ({"rollouts"} if name == "budget" else set())
    summary = summarise(tmp_path).token_budget
    assert summary is not None
    assert ("token budget" in dict(budget_rows(summary))) == (name == "budget")
    if CHROMIUM is not None and name == "budget":
        dom = drawn_by_a_browser(tmp_path, tmp_path)
        section = dom.partition('<section id="token_budget">')[2].partition("</section>")[0]
        assert section.count("<svg") == len(drawn)
        assert 'class="empty"' not in section


def test_a_biased_estimate_is_labelled_in_the_report_and_in_the_summary(tmp_path: Path) -> None:
    reason = "objective.normalize: group weighs a prompt by <its> own count"
    with Observer(tmp_path, config(tmp_path, steps=1)) as observer:
        for _ in range(2):  # started, and resumed
            observer.event("biased", reason)
        metrics, counts = ONE_THING["budget"]
        observer.step(StepRecord(step=1, metrics=metrics, seconds={"step": 1.0}, rollouts_per_prompt=counts))
    section = render(tmp_path).partition('<section id="token_budget">')[2].partition("</section>")[0]
    assert section.count("<b>Biased</b> objective.normalize: group weighs a prompt by &lt;its&gt; own count") == 1
    out = StringIO()
    summary = print_summary(tmp_path, console=Console(file=out, width=200))
    assert summary.token_budget is not None
    assert summary.token_budget.biased == (reason,)
    assert out.getvalue().count(reason) == 1
