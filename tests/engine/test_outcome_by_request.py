"""Draft limits of a step's requests, where the step has others than the strategy was chosen for (vLLM)."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.engine.batch.account import _by_request
from actors.engine.batch.plan import StepPlan

WIDTH = 9


def limits(slots: list[int], decoding: list[int], room: list[int] | None, *, prefill_tokens: int) -> Any:
    table: Any = SimpleNamespace(length=np.zeros(8), tokens=np.zeros((8, WIDTH)))
    plan = StepPlan(
        np.array(slots), np.ones(len(slots), np.int64), np.ones(len(slots), np.bool_), prefill_tokens=prefill_tokens
    )
    given = None if room is None else np.array(room)
    return _by_request(plan, table, None, SimpleNamespace(accepted=None), given, np.array(decoding))["room"].tolist()


@pytest.mark.parametrize(("room", "found"), [([4, 2], [4, 2, 0]), (None, [WIDTH, WIDTH, 0])])
def test_a_prompt_that_ends_with_one_row_had_no_draft(room: list[int] | None, found: list[int]) -> None:
    assert limits([3, 1, 0], [3, 1], room, prefill_tokens=1) == found


@pytest.mark.parametrize(("slots", "found"), [([1], [2]), ([1, 3], [2, 4])])
def test_limits_follow_requests_that_are_preempted_or_in_another_order(slots: list[int], found: list[int]) -> None:
    assert limits(slots, [3, 1], [4, 2], prefill_tokens=0) == found
