"""The rewards to copy from: what a user writes in a few lines is what the objective has built in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rewards import GradeItem, build
from config.rewards import RewardOptions
from examples.own_task.shaping import concise, overlong
from policies.overlong import overlong_penalties


@given(st.lists(st.integers(0, 80), min_size=1, max_size=8), st.integers(1, 64))
def test_overlong_shaping_by_a_user_is_daposs(lengths: list[int], buffer: int) -> None:
    expected = overlong_penalties(lengths, max_tokens=64, buffer_tokens=buffer, penalty=1.0)
    assert [overlong([7] * n, limit=64, buffer=buffer) for n in lengths] == pytest.approx(expected, abs=1e-12)


def test_as_terms_of_a_reward_they_get_tokens_and_the_group() -> None:
    texts = {"<answer>Paris</answer>": 10, "<answer>paris</answer>": 60, "<answer>Rome</answer>": 5, "Paris": 4}
    terms = [
        {"kind": "python", "function": "examples.own_task.reward:grade", "name": "right"},
        {
            "kind": "python",
            "function": "examples.own_task.shaping:overlong",
            "name": "overlong",
            "arguments": {"limit": 64, "buffer": 16},
        },
        {"kind": "python", "function": "examples.own_task.shaping:concise", "name": "concise", "weight": 0.2},
    ]
    items = [
        GradeItem(
            prompt="?",
            response=text,
            record={"answer": "Paris"},
            finish_reason="stop",
            tokens=np.zeros(length, np.int32),
            sample=sample,
        )
        for sample, (text, length) in enumerate(texts.items())
    ]
    with build(RewardOptions.model_validate({"terms": terms})) as grader:
        grades = grader.grade_group(items)
    assert [grade.parts for grade in grades] == [
        {"right": 1.0, "overlong": 0.0, "concise": 1.0},
        {"right": 1.0, "overlong": -0.75, "concise": 0.0},
        {"right": 0.5, "overlong": 0.0, "concise": 0.0},
        {"right": 0.0, "overlong": 0.0, "concise": 0.0},
    ]
    assert [grade.value for grade in grades] == [1.2, 0.25, 0.5, 0.0]


def test_one_right_answer_alone_is_not_concise() -> None:
    group = [{"sample": 0, "response": "<answer>a</answer>", "tokens": [1], "finish_reason": "stop"}]
    assert concise("?", 0, {"answer": "a"}, group) == 0.0
