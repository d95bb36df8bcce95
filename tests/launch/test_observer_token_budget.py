"""What the Observer writes and shows of a token budget, of responses that end early, and of prompts passed over."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from launch.observe import Observer, StepRecord
from launch.observe.journal import read
from launch.observe.live import render, step_line
from launch.observe.state import RunState
from tests.launch.test_observer import make_config

BUDGET = {
    "budget/tokens": 4000.0, "budget/planned_tokens": 4500.0, "budget/spent_tokens": 3900.0, "budget/rollouts_min": 2.0,
    "budget/rollouts_max": 14.0,
}  # fmt: skip
ABORT = {
    "abort/poll_from": 20.0, "abort/give_up_at": 70.0, "abort/answered_share": 0.5, "abort/given_up_share": 0.125,
    "abort/saved_tokens": 1234.4,
}  # fmt: skip


def after(metrics: dict[str, float], step: int = 1, state: RunState | None = None) -> RunState:
    state = RunState(name="demo", steps=10, started_s=0.0) if state is None else state
    state.take(StepRecord(step=step, metrics=metrics, seconds={}), dict(metrics))
    return state


def panel(state: RunState) -> str:
    out = StringIO()
    Console(file=out, width=120).print(render(state, 1.0))
    return out.getvalue()


def test_rollouts_per_prompt_are_written_only_where_something_plans_them(tmp_path: Path) -> None:
    with Observer(tmp_path, make_config()) as observer:
        observer.step(StepRecord(step=1, metrics={}, seconds={}))
        observer.step(StepRecord(step=2, metrics={}, seconds={}, rollouts_per_prompt=[2, 14, 3]))
    assert read(tmp_path / "budget.jsonl") == [{"step": 2, "rollouts": [2, 14, 3]}]
    with Observer(tmp_path, make_config(), resume_from=1):
        pass
    assert read(tmp_path / "budget.jsonl") == [], "cut with the step"


def test_the_live_view_says_what_became_of_the_budget_and_of_late_responses() -> None:
    state = after(BUDGET | ABORT | {"skip/passed_over": 3.0})
    assert "budget 98 %  given up 12 %" in step_line(state)
    shown = panel(state)
    assert "3,900 of 4,000 tokens (98 %), 2 to 14 rollouts a prompt" in shown
    assert "skipped" in panel(after({"skip/passed_over": 3.0}))
    assert "3 prompts passed over" in shown
    assert "50 % after their answer, 12 % given up at 70, about 1,234 tokens saved" in shown


def test_before_anything_is_given_up_the_live_view_says_why() -> None:
    assert "none yet: too few lengths are known" in panel(after({"abort/answered_share": 0.0}))
    at_the_limit = {"abort/answered_share": 0.25, "abort/given_up_share": 0.0, "abort/poll_from": 20.0}
    shown = panel(after(at_the_limit))
    assert "25 % after their answer, none stopped late: the threshold is the length limit" in shown


def test_without_a_budget_the_live_view_says_nothing_of_one() -> None:
    state = after({"tokens_per_s": 1.0, "reward/mean": 0.5}, step=2, state=after(BUDGET | ABORT))
    assert "budget" not in step_line(state) + panel(state), "nor what an earlier step spent"
    assert "given up" not in step_line(state) + panel(state)
