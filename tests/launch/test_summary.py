"""The summary: hand-computed from a few records; the terminal table says it; summary.json holds it."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from contracts.rollout import ReasonUse, StrategyUse
from contracts.spot import MicroStep
from launch.observe import DrafterMeter, Observer, SpeculationMeter, StepRecord
from launch.report.summary import correction_text, print_summary, summarise
from tests.launch.test_observer import make_config
from tests.windows import engine_window


def micro_step(step: int, *, loss: float, accuracy: float, top3_accuracy: float) -> MicroStep:
    return MicroStep(
        step=step,
        session=1,
        epoch=1,
        members=1,
        loss=loss,
        accuracy=accuracy,
        top3_accuracy=top3_accuracy,
        tokens=100,
        target_version=step - 1,
        started_s=float(step),
        seconds=1.5,
    )


def write(run_dir: Path, steps: int = 10) -> None:
    with Observer(run_dir, make_config()) as observer:
        observer.evaluation(0, {"eval/reward": 0.25})
        for step in range(1, steps + 1):
            metrics = {
                "reward/mean": step / 10,
                "tokens/generated": 100.0,
                "tokens_per_s": 10.0 * step,
                "logprob_gap/mean": 1e-7 * step,
                "groups/total": 6.0,
                "groups/used": 3.0,
                "groups/zero_variance": 2.0,
                "groups/ungraded": 1.0,
                "rollouts/reissued": float(step == 3),
            }
            observer.step(StepRecord(step=step, metrics=metrics, seconds={"rollout": 1.0, "learn": 0.5, "step": 2.0}))
        observer.evaluation(steps, {"eval/reward": 0.75})


def test_numbers(tmp_path: Path) -> None:
    write(tmp_path)
    summary = summarise(tmp_path)
    assert (summary.name, summary.status, summary.steps_done, summary.steps_planned) == ("demo", "finished", 10, 10)
    assert (summary.eval_first, summary.eval_last) == (0.25, 0.75)
    assert summary.reward_first == pytest.approx(0.3)
    assert summary.reward_last == pytest.approx(0.8)
    assert (summary.tokens, summary.wall_s, summary.tokens_per_s) == (1000, 20.0, 60.0)
    assert summary.logprob_gap_mean == pytest.approx(1e-6)
    assert (summary.groups_dropped, summary.rollouts_reissued, summary.rollouts_failed) == (20, 1, 0)
    assert summary.seconds["rollout"] == 10.0
    assert summary.seconds["other"] == 5.0
    assert summary.model is None


def test_groups_of_equal_rewards_that_trained_were_not_dropped(tmp_path: Path) -> None:
    """objective.drop_zero_variance=false, or a baseline of the batch."""
    with Observer(tmp_path, make_config()) as observer:
        metrics = {"groups/total": 6.0, "groups/used": 6.0, "groups/zero_variance": 4.0}
        observer.step(StepRecord(step=1, metrics=metrics, seconds={"step": 1.0}))
    assert summarise(tmp_path).groups_dropped == 0


def test_dynamic_sampling_and_its_price_are_in_the_summary(tmp_path: Path) -> None:
    write(tmp_path)
    console = Console(file=StringIO(), width=200)
    assert print_summary(tmp_path, console=console).groups_refilled is None
    assert "dynamic sampling" not in console.file.getvalue()  # type: ignore[attr-defined]
    refilled = tmp_path / "refilled"
    with Observer(refilled, make_config()) as observer:
        for step in (1, 2):
            metrics = {"tokens/generated": 100.0, "tokens/refilled": 20.0 * step, "groups/refilled": 4.0 * step}
            observer.step(StepRecord(step=step, metrics=metrics, seconds={"step": 1.0}))
    summary = print_summary(refilled, console=console)
    assert (summary.groups_refilled, summary.tokens_refilled, summary.objective) == (12, 60, "grpo")
    assert "12 groups sampled beyond the steps' own, with 30 % of the tokens" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("steps", "first", "last"), [(1, 0.1, 0.1), (2, 0.1, 0.2), (5, 0.15, 0.45)])
def test_reward_windows_of_short_runs_do_not_overlap(tmp_path: Path, steps: int, first: float, last: float) -> None:
    write(tmp_path, steps)
    summary = summarise(tmp_path)
    assert (summary.reward_first, summary.reward_last) == (pytest.approx(first), pytest.approx(last))


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], "incomplete"),
        (["interrupted"], "interrupted"),
        (["failed"], "failed"),
        (["failed", "resumed"], "incomplete"),
        (["finished"], "finished"),
    ],
)
def test_status(tmp_path: Path, events: list[str], status: str) -> None:
    write(tmp_path, steps=4)
    with Observer(tmp_path, make_config(), resume_from=4) as observer:
        for kind in events:
            observer.event(kind, "")
    assert summarise(tmp_path).status == status


def test_an_empty_folder_has_an_empty_summary(tmp_path: Path) -> None:
    summary = summarise(tmp_path)
    assert (summary.name, summary.status, summary.steps_done) == (tmp_path.name, "incomplete", 0)
    assert summary.eval_first is None


def test_table_and_file(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    out = StringIO()
    report = tmp_path / "report.html"
    print_summary(tmp_path, report=report, model=tmp_path / "model", console=Console(file=out, width=200))
    text = out.getvalue()
    for part in (
        "10 of 10 in 20s",
        "0.250 -> 0.750 (+0.500)",
        "1,000 tokens, 60 tokens/s",
        "rollout 50 %",
        str(report),
    ):
        assert part in text, part
    assert "1 rollouts re-issued" in text
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert (stored["eval_last"], stored["model"]) == (0.75, str(tmp_path / "model"))


def test_paths_are_whole_in_a_log_however_long(tmp_path: Path) -> None:
    run_dir = tmp_path / ("a" * 60) / ("b" * 60)
    write(run_dir)
    out = StringIO()
    print_summary(run_dir, report=run_dir / "report.html", model=run_dir / "model", console=Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines[-2:]] == [str(run_dir / "model"), str(run_dir / "report.html")]


def speculate(run_dir: Path, *uses: StrategyUse, reasons: tuple[ReasonUse, ...] = ()) -> str:
    """Two equal RL steps with these strategies; returns the table."""
    meter = SpeculationMeter()
    with Observer(run_dir, make_config()) as observer:
        for step in (1, 2):
            meter.window(
                "rollout-0",
                engine_window(end_s=0.2, decode_tokens=1, strategies=uses, reasons=reasons),
            )
            observer.step(StepRecord(step=step, metrics={}, seconds={"step": 1.0}, speculation=meter.take()))
    out = StringIO()
    print_summary(run_dir, console=Console(file=out, width=200))
    return out.getvalue()


def test_what_speculation_gave(tmp_path: Path) -> None:
    plain = StrategyUse(
        strategy="plain",
        engine_steps=60,
        request_steps=600,
        drafted=0,
        accepted=0,
        seconds=1.0,
        draft_s=0.0,
        saved_s=0.0,
    )
    suffix = StrategyUse(
        strategy="suffix:4",
        engine_steps=30,
        request_steps=100,
        drafted=200,
        accepted=150,
        seconds=1.0,
        draft_s=0.1,
        saved_s=1.4,
    )
    ngram = StrategyUse(
        strategy="ngram:2",
        engine_steps=10,
        request_steps=20,
        drafted=40,
        accepted=18,
        seconds=1.0,
        draft_s=0.1,
        saved_s=0.45,
    )
    text = speculate(tmp_path, plain, suffix, ngram)
    line = "accept length 2.40, 70 % of drafts accepted, 3.7 s of decoding saved (suffix 2.8, ngram 0.9)"
    assert line in text
    stored = json.loads((tmp_path / "summary.json").read_text())["speculation"]
    assert stored["share"] == 0.4
    assert stored["accept_length"] == pytest.approx(1 + 168 / 120)
    assert stored["saved_by"] == pytest.approx({"suffix": 2.8, "ngram": 0.9})
    assert list(stored["saved_by"]) == ["suffix", "ngram"]


def test_speculation_that_never_paid_and_that_was_off(tmp_path: Path) -> None:
    assert "never paid" in speculate(
        tmp_path / "on",
        StrategyUse(
            strategy="plain",
            engine_steps=60,
            request_steps=600,
            drafted=0,
            accepted=0,
            seconds=1.0,
            draft_s=0.0,
            saved_s=0.0,
        ),
    )
    write(tmp_path / "off")
    assert summarise(tmp_path / "off").speculation is None


def test_the_summary_says_why_speculation_was_mostly_off(tmp_path: Path) -> None:
    plain = StrategyUse(
        strategy="plain",
        engine_steps=80,
        request_steps=800,
        drafted=0,
        accepted=0,
        seconds=1.0,
        draft_s=0.0,
        saved_s=0.0,
        expected_s=0.9,
        measured_s=1.0,
        missed_s=0.15,
    )
    suffix = replace(plain, strategy="suffix:4", engine_steps=20, drafted=40, accepted=20, saved_s=0.5)
    slow, many = ReasonUse("plain is faster", 50, 50, 46.5), ReasonUse("more requests than max_running", 30)
    text = speculate(tmp_path / "mostly", plain, suffix, reasons=(slow, many, ReasonUse("pays most", 20)))
    assert (
        "off in 80 % of steps: plain decoding was faster (drafts predicted at 0.93x of it) 50 %, "
        "more requests ran than rollout.speculation.max_running 30 %"
    ) in text
    stored = json.loads((tmp_path / "mostly" / "summary.json").read_text())["speculation"]
    assert stored["off_share"] == pytest.approx(0.8)
    assert stored["predicted_error"] == pytest.approx(0.15)
    assert "off in" not in speculate(tmp_path / "seldom", plain, suffix, reasons=(slow, ReasonUse("pays most", 60)))
    throughout = speculate(tmp_path / "throughout", plain, reasons=(many,))
    assert "off in 100 % of steps: more requests ran than rollout.speculation.max_running 100 %" in throughout
    assert "never paid" not in throughout
    assert throughout.count("off in") == 1


def test_a_run_of_which_no_draft_was_accepted_saved_nothing(tmp_path: Path) -> None:
    text = speculate(
        tmp_path,
        StrategyUse(
            strategy="suffix:4",
            engine_steps=60,
            request_steps=600,
            drafted=40,
            accepted=0,
            seconds=1.0,
            draft_s=0.1,
            saved_s=0.018,
        ),
    )
    assert "no drafts accepted (suffix)" in text
    assert "saved" not in text
    stored = json.loads((tmp_path / "summary.json").read_text())["speculation"]
    assert (stored["acceptance"], stored["saved_s"]) == (0, 0)


def test_a_drafter_that_was_tried_twice_has_no_development(tmp_path: Path) -> None:
    meter, speculation = DrafterMeter(), SpeculationMeter()
    with Observer(tmp_path, make_config()) as observer:
        for step in range(1, 41):
            meter.event(
                "rollout-0",
                micro_step(step, loss=2.0, accuracy=0.5, top3_accuracy=0.6),
            )
            name, accepted = ("eagle:4", step) if step in (3, 40) else ("suffix:4", 5)
            use = StrategyUse(
                strategy=name,
                engine_steps=1,
                request_steps=10,
                drafted=40,
                accepted=accepted,
                seconds=0.5,
                draft_s=0.1,
                saved_s=0.0,
            )
            speculation.window(
                "rollout-0",
                engine_window(strategies=(use,)),
            )
            used = speculation.take()
            observer.step(
                StepRecord(
                    step=step, metrics={}, seconds={"step": 1.0}, speculation=used, drafter=meter.take(step - 1, used)
                )
            )
    out = StringIO()
    print_summary(tmp_path, console=Console(file=out, width=200))
    assert "top-3 accuracy 0.60 -> 0.60, drafted in 2 of 40 RL steps" in out.getvalue()


def test_drafter_training(tmp_path: Path) -> None:
    """Windows of two RL steps at either end; steps without training have no accuracy to count."""
    meter, speculation = DrafterMeter(), SpeculationMeter()
    with Observer(tmp_path, make_config()) as observer:
        for step in range(1, 6):
            if step != 3:
                meter.event("rollout-0", micro_step(step, loss=2.0, accuracy=0.05 * step, top3_accuracy=0.1 * step))
                meter.published(step)
            if step == 5:
                meter.rolled_back(4)
            use = StrategyUse(
                strategy="eagle:4",
                engine_steps=1,
                request_steps=10,
                drafted=50,
                accepted=10 * step,
                seconds=0.5,
                draft_s=0.1,
                saved_s=0.4,
            )
            speculation.window(
                "rollout-0",
                engine_window(strategies=(use,)),
            )
            used = speculation.take()
            observer.step(
                StepRecord(
                    step=step, metrics={}, seconds={"step": 1.0}, speculation=used, drafter=meter.take(step - 1, used)
                )
            )
    console = Console(file=StringIO(), width=200)
    found = print_summary(tmp_path, console=console).drafter
    assert found is not None
    assert (found.micro_steps, found.published, found.rolled_back) == (4, 4, 1)
    assert found.worker_s == pytest.approx(6.0)
    assert (found.top3_first, found.top3_last) == (pytest.approx(0.15), pytest.approx(0.45))
    assert (found.accept_first, found.accept_last) == (pytest.approx(2.5), pytest.approx(5.5))
    assert isinstance(console.file, StringIO)
    expected = "4 micro-steps in 6.0 s of idle workers, top-3 accuracy 0.15 -> 0.45, accept length 2.50 -> 5.50, 1 of 4"
    assert expected in console.file.getvalue()
    assert json.loads((tmp_path / "summary.json").read_text())["drafter"]["micro_steps"] == 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (None, None),
        ({"weights": "none", "mask": "none"}, None),
        ({"weights": "token", "truncate": 2.0, "mask": "none"}, "by token, weights up to 2"),
        ({"weights": "geometric", "truncate": 2.0, "floor": 0.5}, "by geometric, weights from 0.5 up to 2"),
        ({"weights": "token", "truncate": None, "mask": "geometric"}, "by token, masked by geometric"),
        ({"weights": "none", "mask": "sequence"}, "masked by sequence"),
    ],
)
def test_a_correction_is_said_in_words(options: dict[str, object] | None, text: str | None) -> None:
    assert correction_text(options) == text


def test_a_corrected_gap_says_so(tmp_path: Path) -> None:
    write(tmp_path)
    console = Console(file=StringIO(), width=200)
    assert print_summary(tmp_path, console=console).correction is None
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("weights: none", "weights: token"))
    print_summary(tmp_path, console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("mean 1e-06; corrected for by token") == 1


@pytest.mark.parametrize(("masters", "said"), [({"eval/master_reward": 0.5}, "0.500"), ({}, "not evaluated")])
def test_a_low_bit_run_says_which_precision_each_reward_is_of(
    tmp_path: Path, masters: dict[str, float], said: str
) -> None:
    config = make_config()
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"quantization": "w8a8"})})
    with Observer(tmp_path, config) as observer:
        observer.evaluation(0, {"eval/reward": 0.25})
        observer.evaluation(4, {"eval/reward": 0.75})
        observer.evaluation(4, {"eval/reward": 0.75, **masters})
    out = StringIO()
    summary = print_summary(tmp_path, console=Console(file=out, width=200))
    assert (summary.eval_last, summary.eval_masters) == (0.75, masters.get("eval/master_reward"))
    assert f"w8a8: 0.750; the same weights in model.dtype: {said}" in out.getvalue()
    assert "rollouts in w8a8, which the learner mirrors" in out.getvalue()
    assert json.loads((tmp_path / "summary.json").read_text())["evaluated_as"] == "w8a8"
