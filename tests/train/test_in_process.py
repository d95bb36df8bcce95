"""experiments.in_process: a run without Ray is the run of the program."""

from typing import Any

import pytest

from tests.train.conftest import SHARP, Runs

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

LEARNED = (
    *("loss/mean", "grad_norm/mean", "reward/mean", "groups/used", "tokens/generated", "logprob_gap/mean", "lr"),
    "length/mean",
)


def test_a_run_in_one_process_has_the_tokens_rewards_and_losses_of_the_program(
    runs: Runs, base: list[dict[str, Any]]
) -> None:
    alone = runs.alone(SHARP)
    assert [{name: row[name] for name in LEARNED} for row in alone.rows] == [
        {name: row[name] for name in LEARNED} for row in base
    ]
    assert alone.texts == runs.texts("base")
    assert alone.evaluations == runs.evaluations("base")


def test_one_process_refuses_threads_that_it_cannot_give_to_both(runs: Runs) -> None:
    with pytest.raises(ValueError, match=r"rollout\.engine\.threads=2"):
        runs.alone("learner.threads=2")
