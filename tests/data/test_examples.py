"""The examples' own conversion, and that the shipped configurations agree with what data and rewards can do."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from actors.data import load_prompts
from actors.rewards import GradeItem, build
from config.data import DataOptions
from config.rewards import RewardOptions, RewardTerm
from config.tree import Config
from examples.humaneval.prepare_mbpp import convert

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = sorted([*(EXAMPLES / "gsm8k").glob("*.yaml"), *(EXAMPLES / "humaneval").glob("*.yaml")])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_rewards_of_the_examples_can_be_built(path: Path) -> None:
    import yaml

    config = Config.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    grader = build(config.reward)
    grader.close()
    assert config.rollout.engine.max_model_tokens is not None
    assert (
        config.rollout.engine.max_model_tokens >= config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    )


def test_prepared_mbpp_is_prompted_and_graded(tmp_path: Path, chat_tokenizer: Any) -> None:
    rows: dict[str, list[Any]] = {
        "text": ["Write a function to add two numbers."],
        "task_id": [601],
        "test_setup_code": ["one = 1"],
        "test_list": [["assert add(one, 2) == 3", "assert add(0, 0) == 0"]],
    }
    for split in ("train", "validation", "test"):
        pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / f"{split}-00000-of-00001.parquet")
        rows["task_id"] = [rows["task_id"][0] + 1]
    target = tmp_path / "out" / "mbpp.jsonl"
    assert convert(str(tmp_path), target) == 3
    prompts = load_prompts(DataOptions(train=str(target), id_field="id"), "train", chat_tokenizer)
    assert [p.uid for p in prompts] == ["mbpp/601", "mbpp/602", "mbpp/603"]
    assert "assert add(one, 2) == 3" in prompts[0].text
    grader = build(RewardOptions(terms=(RewardTerm(kind="code", timeout_s=20),)))
    for body, value in (("a + b", 1.0), ("a - b", 0.0)):
        response = f"```python\ndef add(a, b):\n    return {body}\n```"
        assert (
            grader.grade(GradeItem(prompt=prompts[0].text, response=response, record=prompts[0].record)).value == value
        )
