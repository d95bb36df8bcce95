"""A token budget in whole runs, in one process. That who samples, what is lost and a resume change nothing of it is in
test_ruled_programs.py."""

import pytest

from tests.train.conftest import Runs

pytestmark = pytest.mark.slow

BUDGET = ("rollout.budget.share=1.0", "rollout.budget.max_rollouts=12")


def test_the_first_step_asks_for_equal_counts_and_later_ones_spend_about_the_budget(runs: Runs) -> None:
    alone = runs.alone(*BUDGET)
    assert alone.asked[0] == [6] * 4
    assert any(max(step) - min(step) >= 2 for step in alone.asked[2:])  # eight prompts, four a step: now they are known
    for row in alone.rows[1:]:
        assert 0.5 < row["budget/spent_tokens"] / row["budget/tokens"] < 2
        assert row["budget/spent_tokens"] == row["tokens/generated"]
