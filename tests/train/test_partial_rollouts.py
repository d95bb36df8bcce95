"""Responses that take several RL steps: which tokens they have, which version sampled each, and that stops, losses and
resumes change none of it. In one process."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors.training.checkpoint import checkpoints
from launch import local
from launch.config import load_config
from launch.interrupt import Interrupt, Interrupted
from launch.local import RunRecord
from launch.run import ahead, rl_step
from tests.train.conftest import SHARP, Runs
from tests.train.test_failover import Group, Outcome, _fails, run  # noqa: F401 - a fixture
from tests.train.test_one_step_off import rest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PARTIAL = ("rollout.partial={tokens_per_step: 8, max_steps: 3}", "run.steps=4")
STILL = ("learner.optimizer.lr=1e-12", "objective.sampler_correction.weights=token")  # weights that do not move


def recorded(runs: Runs, *overrides: str) -> RunRecord:
    record = RunRecord(keep_responses=True)
    local.record_run(load_config(runs.config, runs.overrides("partial", *overrides)).config, record)
    return record


def responses(record: RunRecord) -> Counter[tuple[str, str, float]]:
    return Counter((s.prompt, s.response, s.reward) for step in record.responses.values() for s in step)


@pytest.mark.parametrize("staleness", [0, 1])
def test_parts_make_the_very_responses_and_every_token_has_its_version(runs: Runs, staleness: int) -> None:
    """Of weights that do not move, those of a run without parts: each once, in the step that completes its group."""
    whole = recorded(runs, *STILL, "run.steps=4")
    record = recorded(runs, *STILL, *PARTIAL, f"rollout.staleness={staleness}")
    assert responses(record) == responses(whole)
    sampled = sum(step.metrics["tokens/generated"] for step in record.steps)
    assert sampled == sum(step.metrics["tokens/generated"] for step in whole.steps)
    assert [len(step.lengths) for step in record.steps] != [24] * 4, "some groups came later"
    assert record.steps[-1].metrics["partial/groups"] == 0
    parts = Counter[int]()
    for step in record.steps:
        assert len(step.versions) == len(step.lengths)
        for of, length in zip(step.versions, step.lengths, strict=True):
            versions, tokens = [version for version, _ in of], [count for _, count in of]
            assert sum(tokens) == length
            assert all(count == 8 for count in tokens[:-1])
            assert versions == sorted(versions)
            parts[len(of)] += 1
        if step.lengths:
            age = step.step - 1 - min(version for of in step.versions for version, _ in of)
            assert step.metrics["staleness/max"] == age <= 2 + staleness
            assert step.metrics["logprob_gap/mean"] < 1e-5
    assert set(parts) == {1, 2, 3}


def test_what_is_learned_is_weighed_token_by_token(runs: Runs) -> None:
    record = recorded(runs, SHARP, *PARTIAL)
    learned = [step for step in record.steps if step.lengths]
    assert any(len(of) > 1 for step in learned for of in step.versions)
    assert all(abs(step.metrics["sampler_correction/weight"] - 1) < 0.5 for step in learned)
    assert learned[-1].metrics["logprob_gap/mean"] > 1e-5


def test_stopped_lost_and_resumed_it_is_the_undisturbed_run(
    run: Callable[..., RunRecord],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a step of staleness on top: what goes on and what was sampled ahead are both in the checkpoint."""
    settings = (*PARTIAL, "rollout.staleness=1", "checkpoint.every=0")
    whole = Outcome(run("whole", *settings), tmp_path / "whole")
    interrupt, original = Interrupt(), rl_step.sample

    def sample(job: Any, step: int, **options: Any) -> Any:
        if step == 3:  # while step 2 is learned
            interrupt.signal_name, interrupt.requested = "SIGTERM", True
        return original(job, step, **options)

    with monkeypatch.context() as patch:
        patch.setattr(rl_step, "sample", sample)
        with pytest.raises(Interrupted):
            run("stopped", *settings, interrupt=interrupt)
    (saved,) = checkpoints(tmp_path / "stopped/checkpoints")
    assert (saved / ahead.AHEAD_FILE).is_file()
    with monkeypatch.context() as patch:
        patch.setattr(Group, "fails", staticmethod(partial(_fails, {"train_step": 1, "publish": 2}, set(), set())))
        resumed = Outcome(run("stopped", *settings, resume=True), tmp_path / "stopped")
    assert resumed.steps == whole.steps[2:]
    assert rest(resumed, 2)[1:] == rest(whole, 2)[1:]
