"""From the configuration to a policy: every mode, and errors that name the key and the remedy."""

import pytest
from pydantic import ValidationError

from config.speculation import SpeculationOptions
from config.strategy import PLAIN, Strategy
from policies.speculation.bandit import BegMabPolicy
from policies.speculation.build import build_budget, build_policy
from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.defaults import default_arms
from policies.speculation.length_aware import LengthAwareBudget
from policies.speculation.policy import FixedPolicy
from tests.policies.loads import load
from tests.policies.speculation_sim import arms

DRAFTERS = ("ngram", "suffix", "eagle")


def test_off_is_no_policy() -> None:
    assert build_policy(SpeculationOptions(mode="off"), DRAFTERS) is None
    assert build_policy(SpeculationOptions(mode="off", strategies=("eagle:4",)), ()) is None


@pytest.mark.parametrize("mode", ["adaptive", "paper"])
def test_without_drafters_there_is_nothing_to_choose(mode: str) -> None:
    assert build_policy(SpeculationOptions(mode=mode), ()) is None


def test_the_default_is_adaptive_over_the_drafters_at_hand() -> None:
    policy = build_policy(SpeculationOptions(), ("ngram", "suffix"))
    assert isinstance(policy, AdaptivePolicy)
    assert {arm.drafter for arm in policy.arms_at(1)} == {"ngram", "suffix"}
    assert set(policy.arms_at(1)) == set(default_arms(("ngram", "suffix")))
    assert set(policy.arms_at(33)) <= set(policy.arms_at(1))
    assert policy.max_nodes == max(arm.tokens_to_verify for arm in policy.arms_at(1))


def test_adaptive_caps_the_tokens_to_verify_by_the_batch() -> None:
    policy = build_policy(SpeculationOptions(strategies=("suffix:48", "suffix:8", "suffix:2")), DRAFTERS)
    assert policy is not None
    verified = [{arm.tokens_to_verify for arm in policy.arms_at(running)} for running in (1, 8, 32)]
    assert verified[0] >= verified[1] >= verified[2]
    assert verified[0] == {48, 8, 2}
    assert 2 in verified[2]
    assert 48 not in verified[2]
    assert policy.max_nodes == 48


def test_plain_among_the_strategies_is_no_arm_of_its_own() -> None:
    options = SpeculationOptions(strategies=("plain", "suffix:4"))
    policy = build_policy(options, DRAFTERS)
    assert policy is not None
    assert policy.arms_at(1) == list(arms("suffix:4"))


def test_paper_groups_by_tokens_to_verify() -> None:
    options = SpeculationOptions(
        mode="paper", strategies=("suffix:8", "eagle:4x2/8", "suffix:4"), batch_thresholds=(1, 5), max_running=16
    )
    policy = build_policy(options, DRAFTERS)
    assert isinstance(policy, BegMabPolicy)
    assert set(policy.arms_at(4)) == set(arms("suffix:8", "eagle:4x2/8"))
    assert set(policy.arms_at(5)) == set(policy.arms_at(16)) == set(arms("suffix:4"))
    assert policy.arms_at(17) == ()
    assert policy.max_nodes == 8


def test_paper_with_defaults_has_an_arm_at_every_batch() -> None:
    policy = build_policy(SpeculationOptions(mode="paper"), ("suffix", "ngram"))
    assert policy is not None
    assert all(policy.arms_at(running) for running in range(1, 33))


@pytest.mark.parametrize("text", ["suffix:8", "eagle:4x2/12", "plain"])
def test_fixed_is_one_strategy(text: str) -> None:
    policy = build_policy(SpeculationOptions(mode="fixed", strategies=(text,), max_running=4), DRAFTERS)
    assert isinstance(policy, FixedPolicy)
    assert policy.choose(load(4)) == Strategy.parse(text)
    assert policy.choose(load(5)) == PLAIN
    assert policy.max_nodes == Strategy.parse(text).tokens_to_verify


@pytest.mark.parametrize("strategies", [None, (), ("suffix:8", "suffix:4")])
def test_fixed_needs_exactly_one(strategies: tuple[str, ...] | None) -> None:
    options = SpeculationOptions(mode="fixed", strategies=strategies)
    with pytest.raises(ValueError, match=r"rollout\.speculation\.mode: fixed needs exactly one .*strategies"):
        build_policy(options, DRAFTERS)


@pytest.mark.parametrize("mode", ["adaptive", "paper", "fixed"])
@pytest.mark.parametrize("drafters", [("ngram", "suffix"), ()])
def test_a_strategy_without_its_drafter_is_named(mode: str, drafters: tuple[str, ...]) -> None:
    options = SpeculationOptions(mode=mode, strategies=("eagle:4x3/12",))
    at_hand = ", ".join(drafters) or "none"
    with pytest.raises(ValueError, match=rf"rollout\.speculation\.strategies: eagle:4x3/12 .*at hand: {at_hand}"):
        build_policy(options, drafters)


@pytest.mark.parametrize(
    ("thresholds", "says"),
    [((2, 4), "ascend from 1"), ((1, 4, 4), "ascend from 1"), ((), "ascend from 1"), ((1, 2, 3), "3 buckets for 2")],
)
def test_paper_refuses_thresholds_it_cannot_map(thresholds: tuple[int, ...], says: str) -> None:
    options = SpeculationOptions(mode="paper", strategies=("suffix:8", "suffix:4"), batch_thresholds=thresholds)
    with pytest.raises(ValueError, match=rf"rollout\.speculation\.batch_thresholds.*{says}"):
        build_policy(options, DRAFTERS)


@pytest.mark.parametrize(
    "bad",
    [
        {"mode": "clever"},
        {"strategies": ("suffix:0",)},
        {"exploration": 0.6},
        {"epsilon": 1.1},
        {"window": 0},
        {"max_running": 0},
        {"seeds": 1},
    ],
)
def test_options_refuse_what_they_cannot_mean(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(bad))):
        SpeculationOptions.model_validate(bad)


def test_default_arms_name_every_drafter_first_once() -> None:
    found = default_arms(DRAFTERS)
    assert len(set(found)) == len(found)
    assert {arm.drafter for arm in found[:3]} == set(DRAFTERS)
    own = default_arms(("own",))
    assert own
    assert {arm.drafter for arm in own} == {"own"}
    assert not any(arm.is_tree for arm in own)
    assert default_arms(DRAFTERS, trees=False) == tuple(arm for arm in found if not arm.is_tree) != found


def test_an_engine_without_trees_is_offered_chains_only() -> None:
    policy = build_policy(SpeculationOptions(eagle={"path": "random"}), DRAFTERS, trees=False)
    assert isinstance(policy, AdaptivePolicy)
    assert not any(arm.is_tree for running in (1, 8, 32) for arm in policy.arms_at(running))
    assert set(default_arms(DRAFTERS, trees=False)) <= set(policy.arms_at(1))


def test_a_budget_by_length_uses_the_models_of_the_adaptive_choice_and_there_is_none_by_default() -> None:
    options = SpeculationOptions(budget="length_aware")
    policy = build_policy(options, ("ngram", "suffix"))
    assert isinstance(policy, AdaptivePolicy)
    budget = build_budget(options, policy, 16)
    assert isinstance(budget, LengthAwareBudget)
    assert (budget._costs, budget._acceptance) == (policy.costs, policy.acceptance)
    assert build_budget(SpeculationOptions(), policy, 16) is None
    fixed = SpeculationOptions(mode="fixed", strategies=("suffix:8",), budget="length_aware")
    assert build_budget(fixed, build_policy(fixed, ("suffix",)), 16) is None
