"""The README's own example: its configuration is one, and its reward grades."""

import re
from pathlib import Path
from typing import Any

from launch.config import load_config
from tests.docs.pages import ROOT


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def test_the_configuration_is_one_and_names_the_reward(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(block("yaml"), encoding="utf-8")
    config = load_config(tmp_path / "own.yaml").config
    (term,) = config.reward.terms
    assert (config.run.name, term.kind, term.function) == ("own", "python", "my_reward:grade")


def test_the_reward_grades() -> None:
    names: dict[str, Any] = {}
    exec(compile(block("python"), "README.md", "exec"), names)
    record = {"prompt": "The capital of France?", "answer": "Paris"}
    assert names["grade"](record["prompt"], "It is <answer> Paris </answer>.", record) == 1.0
    assert names["grade"](record["prompt"], "<answer>Rome</answer>", record) == 0.0
    assert names["grade"](record["prompt"], "Paris", record) == 0.0
