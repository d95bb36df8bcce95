"""Runs whose next step is sampled while this one is learned: what they sample and learn, against the loop written out;
and that nothing that ends or disturbs them changes it. In one process, where the learner's work comes after the
sampling that it overlaps."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors.training.checkpoint import CheckpointError, checkpoints
from actors.training.errors import NonFiniteError
from launch import local
from launch.config import load_config
from launch.errors import PacelineError
from launch.interrupt import Interrupt, Interrupted
from launch.local import RunRecord
from launch.run import ahead, rl_step
from launch.run.groups import training_sequences
from tests.train.conftest import SHARP, Runs
from tests.train.test_failover import Group, Outcome, _fails, run  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STALE = ("rollout.staleness=1", "checkpoint.every=0")


def losses(record: RunRecord) -> list[float]:
    return [step.metrics["loss/mean"] for step in record.steps]


def test_each_step_learns_what_the_weights_before_the_learners_sampled(runs: Runs) -> None:
    """The loop as the documentation says it: tokens, rewards and losses of four steps."""
    config = load_config(runs.config, runs.overrides("oracle", SHARP, "rollout.staleness=1", "run.steps=4")).config
    record, expected = RunRecord(keep_responses=True), list[tuple[float, list[int], int]]()
    local.record_run(config, record)
    initial = local.initial_weights(config)
    with local.threads_of(config), local.open_job(config, RunRecord(), initial) as job:
        job.learner.begin(config.learner.optimizer, 4 * config.learner.mini_batches)
        job.publish()
        rounds = rl_step.sample(job, 1)
        for step in range(1, 5):
            groups = [group for collected in rounds for group in collected.groups]
            sequences, _ = training_sequences(
                groups, config.objective, prompts_per_step=4, max_new_tokens=config.rollout.sampling.max_new_tokens
            )
            rounds = rl_step.sample(job, step + 1)  # with the weights before this step's update
            loss = job.learner.train_step(sequences, step, asked=24).metrics["loss/mean"]
            members = [member for group in groups for member in group.members]
            (version,) = {member.rollout.weights_version for member in members}
            expected.append((loss, [len(member.rollout.tokens) for member in members], version))
            job.steps_done = step
            job.publish()
    assert [
        (step.metrics["loss/mean"], step.lengths, *{v for of in step.versions for v, _ in of}) for step in record.steps
    ] == expected
    assert [version for *_, version in expected] == [0, 0, 1, 2]
    ages = [[step.metrics[f"staleness/{of}"] for of in ("min", "mean", "max")] for step in record.steps]
    assert ages == [[0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert all(step.metrics["logprob_gap/mean"] > 1e-4 for step in record.steps[1:]), "of another policy"
    assert record.steps[0].metrics["logprob_gap/mean"] < 1e-5
    assert {sample.version for sample in record.responses[3]} == {1}


def test_older_responses_are_weighed_and_a_fresh_step_is_that_of_a_run_without(runs: Runs) -> None:
    usual, stale = (
        runs.alone(SHARP, f"rollout.staleness={age}", "objective.sampler_correction.weights=token", "run.steps=3")
        for age in (0, 1)
    )
    assert stale.rows[0]["loss/mean"] == usual.rows[0]["loss/mean"]
    assert stale.rows[2]["loss/mean"] != usual.rows[2]["loss/mean"]
    assert usual.rows[1]["sampler_correction/weight"] == pytest.approx(1, abs=1e-5)
    assert abs(stale.rows[1]["sampler_correction/weight"] - 1) > 1e-5
    assert "staleness/mean" not in usual.rows[0]


@pytest.fixture
def stale(run: Callable[..., RunRecord]) -> Callable[..., RunRecord]:  # noqa: F811
    """One run with a learner that may be lost; see test_failover."""
    return lambda name, *extra, **options: run(name, *STALE, *extra, **options)


@pytest.fixture
def whole(stale: Callable[..., RunRecord], tmp_path: Path) -> Outcome:
    return Outcome(stale("whole"), tmp_path / "whole")


def rest(outcome: Outcome, after: int) -> tuple[Any, ...]:
    """What a run that goes on from step `after` has yet to do."""
    return outcome.steps[after:], {s: of for s, of in outcome.responses.items() if s > after}, outcome.model


def test_stopped_anywhere_and_resumed_it_is_the_undisturbed_run(
    stale: Callable[..., RunRecord], whole: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked to stop while a step is learned and the next one sampled, it ends both, and its checkpoint has the
    responses. They were drawn with weights that are nowhere any more."""
    interrupt, original = Interrupt(), rl_step.sample

    def sample(job: Any, step: int, **options: Any) -> Any:
        if step == 3:  # while step 2 is learned
            interrupt.signal_name, interrupt.requested = "SIGTERM", True
        return original(job, step, **options)

    with monkeypatch.context() as patch:
        patch.setattr(rl_step, "sample", sample)
        with pytest.raises(Interrupted):
            stale("stopped", interrupt=interrupt)
    (saved,) = checkpoints(tmp_path / "stopped/checkpoints")
    assert (saved.name, (saved / ahead.AHEAD_FILE).is_file()) == ("step_000002", True)
    resumed = Outcome(stale("stopped", resume=True), tmp_path / "stopped")
    assert rest(resumed, 0)[0] == rest(whole, 2)[0]
    assert rest(resumed, 2)[1:] == rest(whole, 2)[1:]
    assert not (checkpoints(tmp_path / "stopped/checkpoints")[-1] / ahead.AHEAD_FILE).exists(), "nothing comes after it"
    (saved / ahead.AHEAD_FILE).write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="the responses that the next step goes on from"):
        ahead.read_ahead(saved, [])


def test_a_failure_while_the_next_step_is_sampled_goes_back_to_the_step_before(
    stale: Callable[..., RunRecord], whole: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the sampling's or the learner's: of the step that was learned nothing is kept."""
    original = rl_step.sample

    def sample(job: Any, step: int, **options: Any) -> Any:
        if step == 4:  # while step 3 is learned
            raise PacelineError("none")
        return original(job, step, **options)

    with monkeypatch.context() as patch:
        patch.setattr(rl_step, "sample", sample)
        with pytest.raises(PacelineError):
            stale("sampling")
    nan = NonFiniteError("loss nan")
    with monkeypatch.context() as patch:
        patch.setattr(Group, "fails", staticmethod(lambda _, name: nan if name == "train_step 3" else None))
        with pytest.raises(NonFiniteError):
            stale("learning")
    for name in ("sampling", "learning"):
        assert [path.name for path in checkpoints(tmp_path / name / "checkpoints")] == ["step_000002"]
        assert rest(Outcome(stale(name, resume=True), tmp_path / name), 2)[1:] == rest(whole, 2)[1:]


def test_a_learner_that_is_lost_at_any_calls_changes_nothing(
    stale: Callable[..., RunRecord], whole: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(5)
    left = {"train_step": source.randint(1, 4), "publish": source.randint(2, 4), "save": 1}
    lost: set[str] = set()
    with monkeypatch.context() as patch:
        patch.setattr(Group, "fails", staticmethod(partial(_fails, left, {7, 12}, lost)))
        record = stale("lost", "learner.max_restarts=20")
    assert lost >= {"train_step", "publish", "save"}
    assert "learner_differs" not in [kind for kind, _ in record.events]
    assert Outcome(record, tmp_path / "lost") == whole


def test_budgets_skips_and_further_rounds_are_decided_as_without(runs: Runs) -> None:
    """From earlier rounds of rollouts, which are all there: the first two steps, of the same weights, ask for what a
    run asks for whose weights do not move."""
    settings = (
        *(SHARP, "run.steps=3", "rollout.budget.share=0.75", "rollout.budget.min_rollouts=2"),
        *("learner.optimizer.lr=1e-12", "objective.sampler_correction.weights=token"),
    )
    usual, stale = (runs.alone(*settings, f"rollout.staleness={age}") for age in (0, 1))
    assert stale.asked == usual.asked
    assert len({tuple(counts) for counts in stale.asked}) > 1
    assert [row["reward/mean"] for row in stale.rows] == [row["reward/mean"] for row in usual.rows]
    rounds = runs.alone(SHARP, "run.steps=3", "rollout.staleness=1", "objective.dynamic_sampling.max_rounds=3")
    assert [row["staleness/max"] for row in rounds.rows] == [0, 1, 1]
    assert max(row["groups/rounds"] for row in rounds.rows) > 1
