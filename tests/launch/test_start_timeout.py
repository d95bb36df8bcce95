"""What a run tells the engines and trainers that it starts."""

import pytest

from config.model import ModelOptions
from launch.config import Config
from launch.run.opening import engine_start


@pytest.mark.parametrize("backend", ["native", "vllm"])
def test_every_engine_may_take_as_long_to_start_as_the_configuration_says(backend: str) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "r"},
            "model": {"path": "m"},
            "data": {"train": "d.jsonl"},
            "rollout": {"engine": {"backend": backend}},
            "cluster": {"start_timeout_s": 777.0},
        }
    )
    assert engine_start(config, ModelOptions(path="m")).keywords["start_timeout_s"] == 777.0
