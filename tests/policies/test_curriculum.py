"""The curriculum by success rate: whom the coin favours, what is remembered, what it costs in bias."""

import json
from typing import Any

import pytest

from config.token_budget import SkipOptions
from policies.token_budget.curriculum import KNOWN, PromptCurriculum
from policies.token_budget.skip import PromptSkip


def curriculum(target: float = 0.5, keep: float = 0.1, **more: Any) -> PromptCurriculum:
    return PromptCurriculum(SkipOptions(target=target, keep=keep), 3, **more)


@pytest.mark.parametrize(
    ("target", "rate", "chance"),
    [
        (0.5, 0.5, 1.0),
        (0.5, 0.25, 0.5),
        (0.5, 0.75, 0.5),
        (0.5, 0.0, 0.1),
        (0.5, 1.0, 0.1),
        (0.8, 0.4, 0.5),
        (0.8, 0.9, 0.5),
    ],
)
def test_the_further_from_the_target_the_rarer(target: float, rate: float, chance: float) -> None:
    assert curriculum(target, known={0: rate}).chance(0) == pytest.approx(chance)


def test_what_is_not_known_is_sampled() -> None:
    rule = curriculum(keep=1e-9)
    assert not any(rule.passes_over(epoch, 0) for epoch in range(50))
    rule.observe(0, [])
    assert rule.chance(0) == 1.0
    rule.observe(0, [0.0] * 8)
    assert all(rule.passes_over(epoch, 0) for epoch in range(50))


def test_the_coin_falls_as_often_as_it_should() -> None:
    rule = curriculum(known={0: 0.2, 1: 0.5})
    sampled = sum(not rule.passes_over(epoch, 0) for epoch in range(4000)) / 4000
    assert sampled == pytest.approx(0.4, abs=0.03)
    assert not any(rule.passes_over(epoch, 1) for epoch in range(100))


def test_older_groups_fade_and_what_was_known_before_is_worth_some_responses() -> None:
    rule = curriculum(known={0: 1.0})
    rule.observe(0, [0.0] * 6 + [1.0] * 2)
    past = rule.state_dict()["successes"]["0"]
    assert past == [KNOWN / 2 + 2, KNOWN / 2 + 8]
    for _ in range(6):
        rule.observe(0, [1.0, 0.0])
    assert rule.chance(0) == pytest.approx(1.0, abs=0.05)


def test_success_is_what_earns_enough() -> None:
    rule = curriculum(right_from=0.5)
    rule.observe(0, [0.5, 0.4, 0.6, -1.0])
    assert rule.chance(0) == 1.0


def test_its_state_is_json_and_another_rules_is_left_alone() -> None:
    rule, again = curriculum(), curriculum()
    for prompt in range(20):
        rule.observe(prompt, [float(prompt % 3 == 0), 0.0])
    again.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert [again.chance(prompt) for prompt in range(20)] == [rule.chance(prompt) for prompt in range(20)]
    settled = PromptSkip(SkipOptions(after=1), 3)
    settled.load_state_dict(rule.state_dict())
    assert settled.state_dict() == {}
    fresh = curriculum(known={1: 0.5})
    fresh.load_state_dict({})
    assert fresh.chance(1) == 1.0
    with pytest.raises(ValueError, match="target"):
        PromptCurriculum(SkipOptions(after=1), 3)
