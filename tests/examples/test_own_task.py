"""The example to copy from: its reward is graded through its configuration, which fits a machine without a GPU too."""

import re
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


@pytest.mark.parametrize("page", ["own_task", "coming_from"])
def test_what_a_page_says_for_a_machine_without_a_gpu_is_accepted(page: str) -> None:
    folder = CONFIG.parents[1] / page
    text = (folder / "README.md").read_text(encoding="utf-8")
    (words,) = re.findall(r"Without a GPU, add\s`([^`]*)`", text)
    for config in sorted(folder.glob("*.yaml")):
        loaded = load_config(config, words.split())
        assert (loaded.config.cluster.layout, loaded.config.cluster.gpu) == ("embedded", None)
