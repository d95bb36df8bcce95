"""The example to copy from: its reward is graded through its configuration."""

from pathlib import Path

import pytest

from actors.rewards import GradeItem, build
from launch.config import load_config

CONFIG = Path(__file__).parents[2] / "examples" / "own_task" / "config.yaml"


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<answer>Paris</answer>", 1.0),
        ("<answer> PARIS\n</answer>", 1.0),
        ("<answer>Rome</answer>", 0.5),
        ("Paris", 0.0),
    ],
)
def test_reward(response: str, value: float) -> None:
    grader = build(load_config(CONFIG).config.reward)
    try:
        grade = grader.grade(
            GradeItem(
                prompt="What is the capital of France?",
                response=response,
                record={"answer": "Paris"},
                finish_reason="stop",
            )
        )
    finally:
        grader.close()
    assert (grade.value, grade.error) == (value, None)
