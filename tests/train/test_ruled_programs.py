"""Whole programs with a token budget, an abort and a filter of prompts: workers, drafts, losses and resumes decide
nothing."""

import re
from pathlib import Path
from typing import Any

import pytest

from actors.training.checkpoint import latest_checkpoint
from launch.observe.journal import read
from launch.report.collect import chart_data
from launch.report.page import BUDGET_CHARTS
from launch.report.summary import summarise
from policies.token_budget.skip import BIAS
from tests.train.conftest import Runs
from tests.train.killing import EVENTS, Moment, VictimName, kill_at, reasons
from tests.train.test_determinism import learning
from tests.train.test_observing import RULED_ONLY, asked
from tests.train.test_resume import start, wait_for_steps
from tests.train.test_ruled_runs import RULED, writer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 8
SETTINGS = (*RULED, "rollout.skip={after: 1, keep: 0.5}", f"run.steps={STEPS}")
DRAFTING = ("drafter.train=true", "drafter.while_it_pays=false", "drafter.micro_step_tokens=64")


@pytest.fixture(scope="module")
def settings(runs: Runs) -> tuple[str, ...]:
    return (writer(runs), *SETTINGS)


@pytest.fixture(scope="module")
def whole(runs: Runs, settings: tuple[str, ...], ray_head: str) -> list[dict[str, Any]]:
    """One worker, plain decoding, no interruption."""
    return runs.run("ruled", *settings, "rollout.speculation.mode=off")


def counts(runs: Runs, name: str) -> list[tuple[int, list[int]]]:
    return [(row["step"], row["rollouts"]) for row in read(runs.root / name / "budget.jsonl")]


def test_it_gives_up_keeps_and_asks_for_unequal_counts(runs: Runs, whole: list[dict[str, Any]]) -> None:
    """Else the comparisons would show nothing."""
    for name in ("abort/given_up_share", "abort/kept_late_share", "abort/answered_share"):
        assert any(row[name] > 0 for row in whole), name
    assert any(len(set(row["rollouts"])) > 2 for row in read(runs.root / "ruled/budget.jsonl"))
    assert all(row["groups/used"] > 0 for row in whole)


def test_the_report_and_the_dashboard_draw_what_the_planner_wrote(runs: Runs, whole: list[dict[str, Any]]) -> None:
    """Its own names of metrics, the counts that were asked for, and what is biased."""
    folder = runs.root / "ruled"
    written = {name for row in whole for name in row}
    assert {name for _, _, names in BUDGET_CHARTS for name in names} <= written
    exported = {"ray_paceline_" + re.sub(r"\W", "_", name) for name in written}
    assert {name for name in asked() if name.startswith(RULED_ONLY)} <= exported
    data = chart_data(folder)
    assert data["token_budget"]["rollouts"]["x"] == list(range(1, STEPS + 1))
    assert [(min(c), max(c)) for _, c in counts(runs, "ruled")] == [
        (row["budget/rollouts_min"], row["budget/rollouts_max"]) for row in whole
    ]
    assert None not in data["token_budget"]["least_variance"]
    summary = summarise(folder).token_budget
    assert summary is not None
    assert summary.spent_tokens == sum(row["tokens/generated"] for row in whole)
    assert BIAS in summary.biased
    assert f"<b>Biased</b> {BIAS}" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_killed_workers_and_engines_and_a_killed_driver_that_resumes_cost_no_token(
    runs: Runs, settings: tuple[str, ...], whole: list[dict[str, Any]], ray_head: str
) -> None:
    """On two workers that draft and train a drafter, and on three once it is resumed."""
    every = (*settings, "checkpoint.every=1", *DRAFTING)
    process = start(runs, ray_head, "ruled-killed", *every, "rollout.workers=2")
    folder: Path = runs.root / "ruled-killed"
    victims: dict[int, VictimName] = {3: "rollout_worker", 4: "engine"}
    for step, victim in victims.items():
        kill_at(process, folder, victim, Moment(step, 0.5), {step: 0.1})
    wait_for_steps(runs, "ruled-killed", process, 5)
    for victim in victims.values():
        assert reasons(folder, victim), f"nothing was said about the {victim}: no {EVENTS[victim]} in events.jsonl"
    process.kill()
    process.wait(30)
    assert latest_checkpoint(folder / "checkpoints") is not None
    rows = runs.run("ruled-killed", *every, "rollout.workers=3", resume=True)
    assert learning(rows) == learning(whole)
    assert runs.texts("ruled-killed") == runs.texts("ruled")
    assert counts(runs, "ruled-killed") == counts(runs, "ruled")
    for name in {name for row in whole for name in row if name.startswith(("budget/", "abort/"))}:
        assert [row.get(name) for row in rows] == [row.get(name) for row in whole], name
