"""What an RL step is asked for under a budget: planned from earlier steps, the same after a resume."""

import json
from typing import Any

import numpy as np
import pytest

from launch.batch import Pick
from launch.config import Config
from launch.run.token_budget import BudgetPlan, TokenBudget
from tests.launch.graded import group_of, prompt_of

PROMPTS, USUAL, LIMIT = 6, 8, 100


def config_of(*, aggregation: str = "fixed_mean_token_sum_norm", **budget: Any) -> Config:
    return Config.model_validate(
        {
            "objective": {"aggregation": aggregation},
            "run": {"name": "x"},
            "model": {"path": "m"},
            "data": {"train": "t"},
            "reward": {"terms": [{"kind": "math"}]},
            "rollout": {
                "rollouts_per_prompt": USUAL,
                "sampling": {"max_new_tokens": LIMIT},
                "budget": budget,
            },
        }
    )


class World:
    """Prompt i is solved with probability i / PROMPTS, in 20 tokens, and 60 if i is odd."""

    def __init__(self, **budget: Any) -> None:
        self.budget = TokenBudget(config_of(**budget), None)
        self.picks = [Pick(0, prompt_of(i)) for i in range(PROMPTS)]

    def step(self, number: int) -> tuple[BudgetPlan, dict[str, float]]:
        plan = self.budget.plan(self.picks)
        groups = []
        for i, count in enumerate(plan.counts):
            size = 60 if i % 2 else 20
            draws = np.random.default_rng([number, i]).random(count) < i / PROMPTS
            groups.append(group_of(draws.astype(float).tolist(), prompt=i, lengths=[size] * count))
        return plan, self.budget.observe(groups)

    def resumed(self, **budget: Any) -> "World":
        other = World(**budget)
        other.budget.load_state_dict(json.loads(json.dumps(self.budget.state_dict())))
        return other


def test_without_a_budget_every_prompt_gets_the_usual_number_and_nothing_is_kept() -> None:
    world = World()
    plan, observed = world.step(1)
    assert (plan.counts, plan.metrics, observed) == ([USUAL] * PROMPTS, {}, {})
    assert world.budget.state_dict() == {}


@pytest.mark.parametrize(("budget", "each"), [({"share": 0.5}, 4), ({"share": 1.0}, 8), ({"tokens_per_step": 1500}, 5)])
def test_before_anything_is_known_counts_are_equal(budget: dict[str, Any], each: int) -> None:
    """A response is taken for half its limit, 50 tokens, then."""
    assert World(**budget).step(1)[0].counts == [each] * PROMPTS


def test_a_share_is_of_what_equal_counts_would_cost_and_is_spent() -> None:
    world = World(share=0.5)
    for number in range(1, 30):
        plan, observed = world.step(number)
    full = USUAL * sum(60 if i % 2 else 20 for i in range(PROMPTS))
    assert plan.metrics["budget/tokens"] == pytest.approx(full / 2)  # whatever the counts of the steps before
    assert plan.metrics["budget/planned_tokens"] == observed["budget/spent_tokens"]
    assert abs(observed["budget/spent_tokens"] - full / 2) <= 20
    assert plan.counts[0] < min(plan.counts[2], plan.counts[4])  # never solved
    assert abs(plan.counts[2] - plan.counts[3]) <= 1  # both vary as much: one is shorter, the other's score larger
    assert plan.metrics["budget/variance"] < plan.metrics["budget/variance_uniform"]
    most = 1 - plan.metrics["budget/variance"] / plan.metrics["budget/variance_uniform"]
    assert most <= plan.metrics["budget/bound"]


def test_where_a_loss_means_over_tokens_short_responses_are_the_ones_that_vary() -> None:
    world = World(share=0.5)
    world.budget = TokenBudget(config_of(aggregation="seq_mean_token_mean", share=0.5), None)
    for number in range(1, 30):
        plan, _ = world.step(number)
    assert plan.counts[2] > 1.5 * plan.counts[3]


def test_a_resumed_run_plans_what_the_undisturbed_one_plans() -> None:
    options = {"share": 0.5, "max_rollouts": 20}
    undisturbed, resumed = World(**options), World(**options)
    for number in range(1, 8):
        expected, observed = undisturbed.step(number)
        resumed = resumed.resumed(**options)
        assert resumed.step(number) == (expected, observed)
    assert resumed.budget.state_dict() == undisturbed.budget.state_dict()


def test_a_run_resumed_from_one_without_a_budget_begins_as_one_that_knows_nothing() -> None:
    world = World().resumed(share=0.5)
    assert world.step(1)[0].counts == World(share=0.5).step(1)[0].counts
