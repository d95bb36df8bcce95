"""Late responses to a prompt go on by what they teach: planned from earlier steps, one rule per prompt."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from contracts.rollout import FinishReason, Marker, SamplingParams, StopRule
from launch.batch import Batch, Pick
from launch.run.groups import PromptGroup
from launch.run.token_budget import BudgetPlan, TokenBudget
from tests.launch.graded import group_of, prompt_of
from tests.launch.test_token_budget import config_of

PROMPTS, LATE_TOKENS = 6, 90
NEVER = Marker(b"x", np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros((0, 2), np.uint16), np.zeros(2, np.uint16))


def rules_of(plan: BudgetPlan) -> list[StopRule]:
    assert isinstance(plan.stop, list)
    return [rule for rule in plan.stop if rule is not None]


class World:
    """One response in three is late. To prompts 0 to 2 late ones are never right, and of the others every tenth; to
    prompts 3 to 5 half of the early and half of the late are."""

    def __init__(self, *, share: float | None = None, **abort: Any) -> None:
        config = config_of(**({} if share is None else {"share": share}))
        options = config.rollout.abort.model_copy(update={"enabled": True, "warmup_responses": 20, **abort})
        rollout = config.rollout.model_copy(update={"abort": options})
        self._config = config.model_copy(update={"rollout": rollout})
        self.budget = TokenBudget(self._config, None, NEVER)
        self.picks = [Pick(0, prompt_of(i)) for i in range(PROMPTS)]

    def step(self, number: int) -> tuple[BudgetPlan, dict[str, float]]:
        plan = self.budget.plan(self.picks)
        rules = rules_of(plan) or [StopRule()] * PROMPTS  # None during the warm-up
        groups = [
            self.group(i, count, rule, np.random.default_rng([number, i]))
            for i, (count, rule) in enumerate(zip(plan.counts, rules, strict=True))
        ]
        return plan, self.budget.observe(groups)

    def group(self, prompt: int, count: int, rule: StopRule, rng: np.random.Generator) -> PromptGroup:
        late = rng.random(count) < 1 / 3
        kept = rng.random(count) < rule.keep
        limit = rule.give_up_at_tokens
        lost = late & ~kept if limit is not None else np.zeros(count, bool)
        right = rng.random(count) < (0.5 if prompt >= 3 else np.where(late, 0.0, 0.1))
        sizes = np.where(lost, limit or 0, np.where(late, LATE_TOKENS, 20)).tolist()
        reasons = [FinishReason.GIVEN_UP if each else FinishReason.STOP for each in lost]
        group = group_of((right & ~lost).astype(float).tolist(), prompt=prompt, lengths=sizes, reasons=reasons)
        members = [
            replace(member, rollout=replace(member.rollout, propensity=rule.keep if each and limit else 1.0))
            for member, each in zip(group.members, late, strict=True)
        ]
        return PromptGroup(group.pick, members)

    def resumed(self) -> "World":
        other = World()
        other._config = self._config
        other.budget = TokenBudget(self._config, None, NEVER)
        other.budget.load_state_dict(json.loads(json.dumps(self.budget.state_dict())))
        return other


LATE = {"abort_quantile": 0.5, "grace_tokens": 5}


def test_late_responses_of_no_use_are_given_up_more_often_than_those_that_teach() -> None:
    world = World(**LATE)
    given_up = 0.0
    for number in range(60):
        plan, observed = world.step(number)
        given_up += observed["abort/given_up_share"]
    keeps = [rule.keep for rule in rules_of(plan)]
    assert max(keeps[:3]) < 0.9 * min(keeps[3:])
    assert given_up > 0
    assert plan.metrics["abort/keep_min"] == min(keeps)
    assert plan.metrics["abort/keep_mean"] == pytest.approx(np.mean(keeps))
    assert plan.counts == [8] * PROMPTS


def test_by_time_more_of_what_holds_the_step_up_is_given_up() -> None:
    """The same rewards: a late token that few share a step with costs several times the others."""
    tokens, seconds = World(**LATE), World(price="time", **LATE)
    for number in range(40):
        by_tokens, by_time = (world.step(number)[0] for world in (tokens, seconds))
    assert by_time.metrics["abort/keep_mean"] < 0.9 * by_tokens.metrics["abort/keep_mean"]


def test_a_number_is_the_probability_of_all() -> None:
    world = World(keep=0.25, **LATE)
    for number in range(5):
        plan, _ = world.step(number)
    assert {rule.keep for rule in rules_of(plan)} == {0.25}


def test_the_floor_is_kept_to() -> None:
    world = World(min_keep=0.9, **LATE)
    for number in range(20):
        plan, _ = world.step(number)
    assert min(rule.keep for rule in rules_of(plan)) == 0.9


def test_requests_have_the_rule_of_their_prompt() -> None:
    world = World(share=1.0, **LATE)
    for number in range(20):
        plan, _ = world.step(number)
    batch = Batch(world.picks, plan.counts, SamplingParams(8), seed=0, expected_tokens=[1.0] * PROMPTS, stop=plan.stop)
    rules = rules_of(plan)
    assert len({rule.keep for rule in rules}) > 1
    for request in batch.requests:
        assert request.stop is rules[batch.place(request.request_id)[0]]


@pytest.mark.parametrize("share", [None, 1.0])
def test_a_resumed_run_plans_what_the_undisturbed_one_plans(share: float | None) -> None:
    undisturbed, resumed = World(share=share, **LATE), World(share=share, **LATE)
    for number in range(8):
        expected = undisturbed.step(number)
        resumed = resumed.resumed()
        found = resumed.step(number)
        assert (found[0].counts, found[0].metrics, found[1]) == (expected[0].counts, expected[0].metrics, expected[1])
        assert [rule.keep for rule in rules_of(found[0])] == [rule.keep for rule in rules_of(expected[0])]
    assert resumed.budget.state_dict() == undisturbed.budget.state_dict()
