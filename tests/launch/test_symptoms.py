"""A run that learns nothing says so; a run that learns, slowly or with luck against it, is not accused."""

import json
import random
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from launch.observe import Observer, StepRecord
from launch.observe.journal import read
from launch.observe.live import render
from launch.observe.records import Sample
from launch.observe.state import RunState
from launch.observe.symptoms import READ, Row, Watch, example, symptoms, trend
from launch.report import write_report
from launch.report.summary import print_summary
from tests.launch.test_observer import make_config

DEAD = {  # own_task on an untrained model, as shipped
    "reward/mean": 0.0,
    "reward/std": 0.0,
    "groups/total": 16.0,
    "groups/used": 0.0,
    "groups/varied": 0.0,
    "groups/ungraded": 0.0,
    "rollouts/truncated": 120.0,
    "rollouts/truncated_share": 0.94,
    "lr": 1e-6,
}
ALIVE = DEAD | {
    "reward/mean": 0.4,
    "reward/std": 0.5,
    "groups/used": 10.0,
    "groups/varied": 10.0,
    "rollouts/truncated": 2.0,
    "rollouts/truncated_share": 0.02,
}


def kinds(rows: list[Row], *, over: bool = False) -> list[str]:
    return [symptom.kind for symptom in symptoms(rows, over=over)]


def test_a_dead_run_is_told_after_three_steps_and_once() -> None:
    watch = Watch()
    told = [[symptom.kind for symptom in watch.take(DEAD)] for _ in range(50)]
    assert told == [["no_reward"], [], ["no_signal", "truncated"], *[[]] * 47]


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        (DEAD, "rollout.sampling.max_new_tokens"),
        (DEAD | {"rollouts/truncated_share": 0.1}, "the format that reward.terms requires"),
        (DEAD | {"rollouts/truncated_share": 0.1, "reward/mean": 1.0}, "if 1 is the best reward, the task is solved"),
        (ALIVE | {"groups/varied": 0.0}, "rollout.sampling.temperature"),
    ],
)
def test_the_likely_cause_is_named(row: Row, remedy: str) -> None:
    assert remedy in symptoms([row] * 3)[0].remedy


def test_games_that_nobody_ends_are_named_by_their_turns() -> None:
    games = DEAD | {"rollouts/truncated": 0.0, "rollouts/truncated_share": 0.0, "turns/limited_share": 1.0}
    (found,) = symptoms([games] * 3)
    assert found.kind == "no_signal"
    assert "100 % of episodes ended at environment.max_turns" in found.remedy


def test_a_first_step_without_any_reward_says_so_with_a_response_and_what_to_do() -> None:
    samples = [
        Sample(
            prompt="2 + 2",
            response="babble " * 40 if index == 0 else "5",
            reward=0.0,
            tokens=9,
            finish_reason="stop",
            notes=("reasoning_gym: no answer in the response",) if index < 6 else ("reasoning_gym: answered 5",),
        )
        for index in range(8)
    ]
    ended = DEAD | {"rollouts/truncated_share": 0.1}
    (told,) = Watch().take(ended, example(samples))
    assert told.kind == "no_reward"
    assert told.message.startswith(
        "all rewards of RL step 1 are 0, so nothing can be learned (reasoning_gym: no answer in the "
        "response: 6 of 8); the first response is 'babble babble"
    )
    assert told.message.endswith("' ...")
    for remedy in ("rollout.sampling.temperature", "data.system_prompt", "fallback: last_number", "easier"):
        assert remedy in told.remedy
    assert "max_new_tokens" not in told.remedy
    assert "max_new_tokens (94 % of responses were cut)" in symptoms([DEAD])[0].remedy
    assert example([*samples, replace(samples[0], reward=0.01)]) == example([]) == ""
    assert "(" not in example([replace(sample, notes=(str(i),)) for i, sample in enumerate(samples)])
    few = ended | {"groups/total": 4.0}
    assert [[symptom.kind for symptom in symptoms([few] * n)] for n in (1, 2)] == [[], ["no_reward"]]
    assert symptoms([few] * 2)[0].message.startswith("all rewards of RL steps 1 to 2 are 0")
    assert kinds([ALIVE, ended]) == kinds([ended | {"groups/ungraded": 16.0}]) == []


def test_zero_variance_groups_that_train_do_not_hide_it() -> None:
    """objective.drop_zero_variance=false: every group is used, none teaches anything."""
    assert kinds([DEAD | {"groups/used": 16.0}] * 3) == ["no_signal", "truncated"]


def test_chance_is_no_symptom() -> None:
    small = {"groups/total": 4.0, "rollouts/truncated": 15.0}
    assert kinds([ALIVE] * 30) == []
    assert kinds([DEAD, DEAD, ALIVE, DEAD, DEAD]) == []
    assert kinds([ALIVE, *[DEAD | small] * 3]) == []  # 12 groups in a row
    assert kinds([DEAD | small] * 8) == ["no_signal", "truncated"]
    assert (
        kinds([ALIVE | {"groups/varied": 0.0, "groups/ungraded": 16.0}] * 3) == []
    )  # graded by nobody: an error of its own
    assert kinds([{"reward/mean": 0.5}] * 10) == []  # of an older version


def few_groups(entropy: float | None) -> list[Row]:
    """Five steps that learn, then eight of which every other trains half of its groups and has an entropy."""
    learns: Row = ALIVE | {"entropy": 0.8}
    trains: Row = ALIVE | {"groups/varied": 8.0, "reward/mean": 0.9} | ({} if entropy is None else {"entropy": entropy})
    rests: Row = ALIVE | {"groups/varied": 0.0, "reward/mean": 0.9}
    return [learns] * 5 + [trains, rests] * 4


def test_few_groups_with_a_signal_are_told_once_and_are_no_flat_reward() -> None:
    rows = few_groups(0.4)
    assert kinds(rows[:-1]) == kinds(rows[:5] * 7) == []
    (found,) = symptoms(rows)
    assert found.kind == "little_signal"
    assert found.message == "75 % of groups had equal rewards in the last 8 RL steps (mean reward 0.9)"
    assert "rollout.skip.target" in found.remedy
    assert "lr" not in found.remedy
    assert kinds(rows[-8:] * 5) == ["little_signal"]  # 40 steps without a rise
    watch = Watch()
    assert [symptom.kind for row in rows * 3 for symptom in watch.take(row)] == ["little_signal"]
    assert kinds([row | {"groups/total": 3.0, "groups/varied": 0.5} for row in rows]) == []  # 24 groups: chance


@pytest.mark.parametrize("entropy", [0.05, 0.0])
def test_a_collapse_is_told_by_the_entropy_of_the_steps_that_train(entropy: float) -> None:
    (found,) = symptoms(few_groups(entropy))
    assert f"entropy fell to {100 * entropy / 0.8:.0f} % of its start" in found.message
    assert "a smaller learner.optimizer.lr" in found.remedy
    assert "entropy" not in symptoms(few_groups(None))[0].message


class Asked(dict[str, float]):
    """A row that notes what it is asked for."""

    names: set[str] = set()  # noqa: RUF012

    def get(self, name: str, default: object = None) -> object:  # type: ignore[override]
        Asked.names.add(name)
        return super().get(name, default)


def test_what_is_kept_of_a_step_is_what_symptoms_read() -> None:
    over_budget = {"budget/planned_tokens": 900.0, "budget/tokens": 500.0, "budget/rollouts_mean": 1.0}
    budget = over_budget | {"budget/rollouts_min": 1.0, "budget/rollouts_max": 1.0}
    for rows in ([DEAD] * 40, [ALIVE] * 40, [ALIVE | budget] * 40, few_groups(0.05)):
        symptoms([Asked(row) for row in rows])
    assert Asked.names == READ
    watch = Watch()
    watch.take(DEAD | {"length/mean": 1.0})
    assert watch._rows[0].keys() == DEAD.keys() & READ


def test_a_run_that_is_over_is_judged_by_what_it_has() -> None:
    assert kinds([DEAD]) == ["no_reward"]
    assert kinds([DEAD], over=True) == ["no_signal", "truncated"]
    assert kinds([ALIVE, DEAD], over=True) == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("rise", [0.0, 0.1])
def test_a_flat_reward_is_told_from_a_slow_rise(rise: float, seed: int) -> None:
    """Noise of a step's mean 0.03: a rise of 0.1 in 40 steps is never called flat; of none, most runs are."""
    noise = random.Random(seed)
    rewards = [0.4 + rise * i / 39 + noise.gauss(0, 0.03) for i in range(40)]
    slope, error = trend(rewards)
    found = kinds([ALIVE | {"reward/mean": reward} for reward in rewards])
    assert found == ([] if slope > error else ["flat_reward"])
    assert rise == 0 or not found


def test_a_learning_rate_of_zero_is_named() -> None:
    rows = [ALIVE | {"lr": 0.0, "reward/mean": 0.4 + 0.01 * (-1) ** i} for i in range(40)]
    assert "the learning rate was 0 throughout" in symptoms(rows)[0].remedy
    assert kinds(rows[:39]) == []


def test_the_trend_of_a_line_is_its_rise() -> None:
    assert trend([1.0, 1.5, 2.0, 2.5]) == pytest.approx((1.5, 0.0))
    assert trend([1.0, 2.0, 1.0]) == pytest.approx((0.0, (2 / 3 / 1 / 2) ** 0.5 * 2))


def test_it_is_on_the_terminal_in_the_events_the_summary_and_the_report(tmp_path: Path) -> None:
    out = StringIO()
    with Observer(tmp_path, make_config(live=True), console=Console(file=out, width=200)) as observer:
        for step in (1, 2, 3):
            observer.samples(step, [Sample(prompt="?", response="hm", reward=0.0, tokens=1, finish_reason="stop")])
            observer.step(StepRecord(step=step, metrics=DEAD, seconds={"step": 1.0}))
    assert "no_reward: all rewards of RL step 1 are 0, so nothing can be learned; the first response is 'hm'" in (
        out.getvalue()
    )
    assert "groups 0/16  cut 94 %" in out.getvalue()
    assert "no_signal: nothing can be learned from the last 3 RL steps" in out.getvalue()
    events = {event["kind"]: event["message"] for event in read(tmp_path / "events.jsonl")}
    assert "rollout.sampling.max_new_tokens" in events["no_signal"]
    assert "truncated" in events
    shown = StringIO()
    print_summary(tmp_path, console=Console(file=shown, width=300))
    assert "in each of 48 groups all rewards were equal (0)" in shown.getvalue()
    assert len(json.loads((tmp_path / "summary.json").read_text())["warnings"]) == 2
    assert "in each of 48 groups all rewards were equal (0)" in write_report(tmp_path).read_text()


def test_a_resumed_run_remembers_the_steps_before(tmp_path: Path) -> None:
    for first, last in ((None, 2), (2, 3)):
        with Observer(tmp_path, make_config(), resume_from=first) as observer:
            for step in range((first or 0) + 1, last + 1):
                observer.step(StepRecord(step=step, metrics=DEAD, seconds={"step": 1.0}))
    assert "no_signal" in [event["kind"] for event in read(tmp_path / "events.jsonl")]


def test_the_live_panel_shows_it() -> None:
    state = RunState(
        name="demo", steps=10, started_s=0.0, metrics=dict(DEAD), warnings=["no_signal: nothing to learn from"]
    )
    out = StringIO()
    Console(file=out, width=120).print(render(state, 1.0))
    assert "0 of 16 trained, 94 % of responses cut at the length limit" in out.getvalue()
    assert "no_signal: nothing to learn from" in out.getvalue()


def test_a_budget_that_the_fewest_responses_exceed_is_told_once_and_rounding_is_not() -> None:
    """16 prompts of 2 responses, 100 tokens each."""
    plan = {"budget/rollouts_min": 2.0, "budget/rollouts_mean": 2.0, "budget/rollouts_max": 2.0}
    over = ALIVE | plan | {"budget/planned_tokens": 3200.0, "budget/tokens": 1600.0}
    watch = Watch()
    told = [watch.take(over) for _ in range(30)]
    (symptom,) = [symptom for found in told for symptom in found]
    assert told[7] == [symptom]
    assert symptom.kind == "budget_exceeded"
    assert "2.00 times the token budget" in symptom.message
    assert "rollout.budget.share" in symptom.remedy
    for fine in ({"budget/tokens": 3160.0}, {"budget/rollouts_max": 3.0}, {"budget/tokens": 9000.0}):
        assert kinds([over | fine] * 30) == []
        assert kinds([*[over] * 7, over | fine, *[over] * 7]) == []
