"""What a run tells the engines and trainers that it starts."""

from typing import Any

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


@pytest.mark.parametrize(
    ("changed", "truncated"),
    [
        ({}, False),
        ({"rollout": {"sampling": {"top_p": 0.95}}}, True),
        ({"rollout": {"sampling": {"top_k": 40}}}, True),
        ({"eval": {"top_p": 0.9, "sets": [{"name": "held", "path": "e.jsonl"}]}}, True),
        ({"eval": {"sets": [{"name": "held", "path": "e.jsonl", "top_k": 5}]}}, True),
        ({"eval": {"top_p": 0.9}}, False),  # of no set
    ],
    ids=str,
)
def test_engines_know_whether_top_k_or_top_p_will_come(changed: dict[str, Any], truncated: bool) -> None:
    given = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"train": "d.jsonl"}} | changed
    start = engine_start(Config.model_validate(given), ModelOptions(path="m"))
    assert start.keywords["truncated"] is truncated
