"""The model of the highest held-out reward: when it is kept, and what the summary says of it."""

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from launch.observe import Observer
from launch.report.summary import print_summary
from launch.run.best import improves, keep_best
from tests.launch.test_observer import make_config


class FakeJob(SimpleNamespace):
    """A job that notes what it exports."""

    def __init__(self, rewards: dict[int, float], **changes: Any) -> None:
        config = make_config()
        update = {"eval": config.eval.model_copy(update={"every": 2}), **changes}
        self.exported: list[str] = []
        self.events: list[str] = []
        super().__init__(
            config=config.model_copy(update=update),
            steps_done=max(rewards),
            evaluations={str(step): {"eval/reward": reward} for step, reward in rewards.items()},
            sampling=SimpleNamespace(stop_token_ids=(2, 7)),
            learner=SimpleNamespace(export=self.export),
            observer=SimpleNamespace(event=lambda kind, message: self.events.append(f"{kind}: {message}")),
        )

    def export(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text('{"eos_token_id": 2}')
        self.exported.append(folder.name)


@pytest.mark.parametrize(
    ("rewards", "better"),
    [
        ({0: 0.5}, False),  # before training: no model of the run
        ({0: 0.5, 2: 0.6}, True),
        ({0: 0.5, 2: 0.5}, False),
        ({0: 0.5, 2: 0.4}, False),
        ({0: 0.5, 2: 0.7, 4: 0.6}, False),
        ({0: 0.5, 2: 0.6, 10: 0.7}, True),
    ],
)
def test_kept_where_it_is_better_than_everything_before(
    tmp_path: Path, rewards: dict[int, float], better: bool
) -> None:
    job = FakeJob(rewards)
    keep_best(job, tmp_path)
    assert job.exported == ["best"] * better
    if better:
        step = max(rewards)
        assert json.loads((tmp_path / "best/best.json").read_text()) == {"step": step, "eval/reward": rewards[step]}
        assert json.loads((tmp_path / "best/generation_config.json").read_text()) == {"eos_token_id": [2, 7]}
        assert f"eval/reward {rewards[step]:.3f} after step {step}" in job.events[0]
        keep_best(job, tmp_path)  # resumed here: it is there
        assert len(job.exported) == 1


def test_best_is_by_the_metric_that_is_named(tmp_path: Path) -> None:
    checkpoint = make_config().checkpoint.model_copy(update={"best_metric": "eval/aime/pass@8"})
    job = FakeJob({0: 0.5, 2: 0.9, 4: 0.6}, checkpoint=checkpoint)
    for step, value in (("0", 0.1), ("2", 0.2), ("4", 0.3)):
        job.evaluations[step]["eval/aime/pass@8"] = value
    keep_best(job, tmp_path)
    assert json.loads((tmp_path / "best/best.json").read_text()) == {"step": 4, "eval/aime/pass@8": 0.3}
    assert "eval/aime/pass@8 0.300 after step 4" in job.events[0]


def test_of_a_low_bit_run_it_says_in_which_precision_it_was_evaluated(tmp_path: Path) -> None:
    rollout = make_config().rollout.model_copy(update={"quantization": "w4a8"})
    keep_best(FakeJob({0: 0.5, 2: 0.6}, rollout=rollout), tmp_path)
    record = {"step": 2, "eval/reward": 0.6, "evaluated_as": "w4a8", "weights": "float32"}
    assert json.loads((tmp_path / "best/best.json").read_text()) == record


def test_an_evaluation_later_than_this_one_does_not_count() -> None:
    assert improves({"2": {"eval/reward": 0.6}, "4": {"eval/reward": 0.9}}, 2)
    assert not improves({"2": {}}, 2)


def test_nothing_is_kept_unasked(tmp_path: Path) -> None:
    config = make_config()
    for changes in (
        {"checkpoint": config.checkpoint.model_copy(update={"best": False})},
        {"eval": config.eval},  # only before and after
    ):
        job = FakeJob({0: 0.5, 2: 0.6}, **changes)
        keep_best(job, tmp_path)
        assert job.exported == []


def test_the_summary_names_the_best_where_it_is_not_the_last(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best/config.json").touch()
    with Observer(tmp_path, make_config()) as observer:
        for step, reward in ((0, 0.9), (2, 0.4), (4, 0.7), (6, 0.6)):
            observer.evaluation(step, {"eval/reward": reward})
    out = StringIO()
    summary = print_summary(tmp_path, console=Console(file=out, width=200))
    assert (summary.eval_best, summary.eval_best_step) == (0.7, 4)
    assert "0.900 -> 0.600 (-0.300), best 0.700 after step 4" in out.getvalue()
    assert f"best model       {tmp_path / 'best'}" in out.getvalue()
