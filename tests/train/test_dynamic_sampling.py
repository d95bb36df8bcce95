"""Dynamic sampling in whole runs: which prompts are sampled, and what is learned, does not depend on who or when."""

import random
import signal
import time

import pytest

from tests.train.conftest import STEPS, Alone, Runs
from tests.train.test_determinism import learning
from tests.train.test_resume import start, wait_for_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Few responses of the untrained network match: most groups have no signal, so steps take several rounds.
DAPO = (
    "reward.terms=[{kind: format, pattern: 'off|so x'}]",
    "rollout.rollouts_per_prompt=3",
    "objective={name: dapo, overlong: {buffer_tokens: 16}, mask_truncated: true, dynamic_sampling: {max_rounds: 3}}",
)
SAMPLING = ("groups/total", "groups/rounds", "groups/refilled", "groups/surplus", "tokens/refilled", "overlong/reward")


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Alone:
    return runs.alone(*DAPO)


def test_steps_take_several_rounds_and_use_no_more_groups_than_asked_for(alone: Alone) -> None:
    assert max(row["groups/refilled"] for row in alone.rows) > 0
    assert all(row["tokens/refilled"] < row["tokens/generated"] for row in alone.rows)
    assert all(row["groups/used"] <= 4 for row in alone.rows)


@pytest.mark.ray
@pytest.mark.long
def test_a_killed_run_on_two_workers_ends_like_an_undisturbed_one_on_one(
    runs: Runs, alone: Alone, ray_head: str
) -> None:
    undisturbed = alone.rows
    seed = time.time_ns()
    moment = random.Random(seed)
    extra = (*DAPO, "rollout.workers=2", "checkpoint.every=1", "observe.samples_per_step=1000")
    process = start(runs, ray_head, "dapo-killed", *extra)
    wait_for_steps(runs, "dapo-killed", process, moment.randint(2, STEPS - 2))  # so there is a checkpoint
    time.sleep(moment.uniform(0, 0.5))
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    resumed = runs.run("dapo-killed", *extra, resume=True)
    assert learning(resumed) == learning(undisturbed), f"moment {seed}"
    for name in SAMPLING:
        assert [row[name] for row in resumed] == [row[name] for row in undisturbed], f"{name}, moment {seed}"
    assert runs.texts("dapo-killed") == alone.texts
