"""A run on generated tasks, without Ray: shares, numbers by set, grades by the data sets' own scorers."""

import importlib.util

import pytest

from actors.rewards.generated import tagged_answer
from launch import local
from launch.config import load_config
from launch.config.hub import converted
from tests.train.conftest import Runs

TASKS = (
    "data.reasoning_gym=[{name: sums, dataset: chain_sum, size: 20, eval: 3, weight: 3, config: {max_digits: 1}}, "
    "{name: letter_counting, size: 20, eval: 2}]"
)
OFF = ("data.train=null", "data.eval=null", "run.steps=2", "rollout.rollouts_per_prompt=3", "data.limit=null")


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym")
def test_a_run_has_its_shares_and_numbers_of_each_task_and_the_scorers_grades(runs: Runs) -> None:
    term = "reward.terms=[{kind: reasoning_gym, fallback: last_number}]"
    config = load_config(runs.config, runs.overrides("gym", TASKS, term, *OFF)).config
    record = local.RunRecord(keep_responses=True)
    local.record_run(converted(config), record)
    for step in record.steps:
        assert (step.metrics["data/sums/prompts"], step.metrics["data/letter_counting/prompts"]) == (3.0, 1.0)
        assert step.metrics["rollouts/failed"] == 0
        mean = (3 * step.metrics["data/sums/reward"] + step.metrics["data/letter_counting/reward"]) / 4
        assert step.metrics["reward/mean"] == pytest.approx(mean) == pytest.approx(step.metrics["reward/reasoning_gym"])
    for metrics in record.evaluations.values():
        assert metrics["eval/reward"] == pytest.approx(
            (metrics["eval/sums/reward"] + metrics["eval/letter_counting/reward"]) / 2
        )
    samples = [sample for of_step in record.responses.values() for sample in of_step]
    assert len(samples) == 2 * 4 * 3
    for sample in samples:
        right = tagged_answer(sample.response, "last_number") == sample.answer
        assert sample.error is None
        assert (sample.reward == 1.0) == right
