"""Two RL steps of the systems' examples, through the whole program, on a tiny untrained network: one for each way of
drafting, and the one in which all that goes together is on. Longer runs of all of them: experiments/ablation.py."""

import pytest

from launch.config import load_config
from launch.run.train import train
from tests.launch.test_memory import EXAMPLES
from tests.train.conftest import Runs

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 2


def check_trains(runs: Runs, name: str) -> None:
    small = [
        f"run.dir={runs.root}",
        f"run.steps={STEPS}",
        f"model.path={runs.root}/model",
        "warmup=null",
        f"data={{train: {runs.root}/data/train.jsonl, template: plain, limit: 8}}",
        "rollout.prompts_per_step=4",
        "rollout.rollouts_per_prompt=6",
        "rollout.sampling={temperature: 0.3, max_new_tokens: 48}",
        "checkpoint.every=0",
        "observe={live: false, tensorboard: false, samples_per_step: 1000}",
    ]
    no_fit = ["drafter.offline=null"] if name == "everything" else []
    config = load_config(EXAMPLES / f"systems/{name}.yaml", [*small, *no_fit]).config
    assert train(config, config_source="test", resume=False) == 0
    steps = runs.steps(name)
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(row["tokens/generated"] > 0 for row in steps)


def test_all_that_goes_together_trains(runs: Runs, ray_head: str) -> None:
    check_trains(runs, "everything")
    assert len(runs.texts("everything")) < STEPS * 4 * 6, "there is a budget"
    assert all(row["weights/quantise_s"] > 0 for row in runs.steps("everything"))


@pytest.mark.long
def test_systems_that_change_no_token_sample_the_same(runs: Runs, ray_head: str) -> None:
    for name in ("das", "efficient_rollout"):
        check_trains(runs, name)
    assert runs.texts("das") == runs.texts("efficient_rollout")
    assert len(runs.texts("das")) == STEPS * 4 * 6
