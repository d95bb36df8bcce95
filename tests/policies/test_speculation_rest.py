"""Rollouts that decode plainly because choosing costs more than drafts save."""

import pytest

from policies.speculation.bandit import BegMabPolicy
from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.defaults import default_arms
from policies.speculation.policy import FixedPolicy
from policies.speculation.rest import ENOUGH_STEPS, LONGEST, Rest, may_rest


def rollout(rest: Rest, saved_s: float, chose_s: float, steps: int = ENOUGH_STEPS) -> bool:
    """Whether it rested. Of 1 ms steps, what they saved and cost together."""
    rested = rest.on
    for _ in range(steps):
        rest.decoded(1e-3, 0.0 if rested else saved_s / steps, 0.0 if rested else chose_s / steps)
    rest.ended()
    return rested


def test_it_rests_longer_each_time_until_drafts_pay() -> None:
    rest = Rest()
    found = [rollout(rest, saved_s=1e-3, chose_s=5e-3) for _ in range(48)]
    awake = [index for index, rested in enumerate(found) if not rested]
    assert awake == [0, 2, 7, 24, 41]
    assert awake[-1] - awake[-2] == LONGEST + 1
    while rest.on:
        rollout(rest, 0.0, 0.0)
    assert not rollout(rest, saved_s=9e-3, chose_s=5e-3)
    assert [rollout(rest, saved_s=1e-3, chose_s=5e-3) for _ in range(3)] == [False, True, False], "it began anew"


@pytest.mark.parametrize(
    ("saved_s", "chose_s"),
    [(6e-3, 5e-3), (-9e-3, 1e-3)],
    ids=["drafts pay for it", "choosing costs next to nothing: accounts of drafters stop those that lose"],
)
def test_it_does_not_rest_where(saved_s: float, chose_s: float) -> None:
    rest = Rest()
    assert not any(rollout(rest, saved_s, chose_s) for _ in range(20))


def test_corrections_count_and_short_rollouts_are_judged_together() -> None:
    rest = Rest()
    for _ in range(4):
        assert not rollout(rest, saved_s=2e-3, chose_s=1e-3, steps=ENOUGH_STEPS // 4)
    assert not rest.on
    for step in range(4):
        assert not rest.on
        rest.corrected(-1.5e-3)
        rollout(rest, saved_s=2e-3, chose_s=1e-3, steps=ENOUGH_STEPS // 4)
        assert rest.on == (step == 3)
    rollout(rest, 0.0, 0.0, steps=ENOUGH_STEPS - 1)  # a few steps are no rollout
    found = [rest.on]
    rest.wake()
    assert [*found, rest.on] == [True, False]


def test_a_fixed_strategy_and_algorithm_1_never_rest() -> None:
    arms = default_arms(("suffix",))
    assert may_rest(AdaptivePolicy(arms, max_running=8, exploration=0.01))
    assert not may_rest(BegMabPolicy(arms, thresholds=None, epsilon=0.1, window=8, max_running=8, seed=0))
    assert not may_rest(FixedPolicy(arms[0]))
    assert not may_rest(None)
