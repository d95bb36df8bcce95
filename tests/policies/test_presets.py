"""Objectives by name: defaults that what is written overrides, and settings that would be ignored."""

import json
from typing import Any, get_args

import pytest

from config.objective import Name, ObjectiveOptions
from config.presets import LOSSES, PRESETS

NAMES = get_args(Name)


def test_there_is_a_preset_for_every_name_and_defaults_for_every_loss() -> None:
    assert tuple(PRESETS) == NAMES
    assert {preset["loss"] for preset in PRESETS.values()} == set(LOSSES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_consistent_and_survives_being_written_out(name: str) -> None:
    options = ObjectiveOptions(name=name).sized(100)
    assert list(options.contradictions()) == []
    assert ObjectiveOptions(**options.model_dump()) == options
    assert ObjectiveOptions.model_validate_json(json.dumps(options.model_dump()), strict=True) == options


def test_the_default_is_grpo_as_it_was() -> None:
    options = ObjectiveOptions()
    assert options == ObjectiveOptions(name="grpo")
    assert (options.loss, options.baseline, options.normalize, options.aggregation) == (
        *("clip", "group", "group", "token_mean"),
    )
    assert (options.clip_low, options.clip_high, options.clip_dual) == (0.2, 0.28, 3.0)
    assert (options.kl, options.kl_coef, options.entropy_coef) == ("none", 0.0, 0.0)
    assert options.drop_zero_variance
    assert (options.overlong.buffer_tokens, options.dynamic_sampling.max_rounds) == (0, 1)


def test_what_is_written_wins_over_the_preset() -> None:
    options = ObjectiveOptions(name="dapo", clip_high=0.3, dynamic_sampling={"max_rounds": 2})
    assert (options.clip_low, options.clip_high, options.clip_dual) == (0.2, 0.3, 10.0)
    assert options.dynamic_sampling.max_rounds == 2
    assert options.sized(200).overlong.buffer_tokens == 40
    assert ObjectiveOptions(name="dapo", overlong={"penalty": 0.5}).sized(200).overlong.buffer_tokens == 40


def test_another_loss_brings_its_own_bounds() -> None:
    options = ObjectiveOptions(name="dapo", loss="cispo")
    assert (options.clip_low, options.clip_high, options.clip_dual) == (None, 4.0, None)
    assert list(options.contradictions()) == []


def test_switching_a_term_off_takes_its_settings_with_it() -> None:
    for switched in (
        ObjectiveOptions(name="reinforce_pp", kl="none"),
        ObjectiveOptions(name="dapo", drop_zero_variance=False),
        ObjectiveOptions(name="dapo", baseline="batch"),
        ObjectiveOptions(name="dr_grpo", aggregation="token_mean").sized(100),
    ):
        assert list(switched.contradictions()) == []


@pytest.mark.parametrize(
    ("written", "dropped"),
    [
        ({}, True),
        ({"baseline": "leave_one_out"}, True),
        ({"baseline": "batch"}, False),
        ({"baseline": "none"}, False),
        ({"baseline": "none", "drop_zero_variance": True}, True),
        ({"name": "reinforce_pp"}, False),
        ({"name": "reinforce", "baseline": "group"}, True),
    ],
)
def test_groups_of_equal_rewards_are_dropped_where_only_their_own_mean_would_be_subtracted(
    written: dict[str, Any], dropped: bool
) -> None:
    options = ObjectiveOptions.model_validate(written)
    assert options.drop_zero_variance == dropped
    assert list(options.contradictions()) == []


@pytest.mark.parametrize("name", ["dr_grpo", "duet"])
def test_sums_are_divided_by_the_longest_response_unless_told_otherwise(name: Name) -> None:
    assert ObjectiveOptions(name=name).sized(200).sum_divisor == 200
    assert ObjectiveOptions(name=name, sum_divisor=50).sized(200).sum_divisor == 50


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"kl_coef": 0.1}, "kl_coef"),
        ({"kl_in": "reward"}, "kl_in"),
        ({"kl": "k1", "kl_in": "reward"}, "kl_coef"),
        ({"sum_divisor": 10}, "sum_divisor"),
        ({"name": "cispo", "clip_dual": 3.0}, "clip_dual"),
        ({"name": "rloo", "clip_low": 0.2}, "clip_low"),
        ({"loss": "clip", "clip_high": None}, "clip_high"),
        ({"dynamic_sampling": {"max_rounds": 3}, "drop_zero_variance": False}, "dynamic_sampling.max_rounds"),
        ({"overlong": {"penalty": 0.5}}, "overlong.penalty"),
        ({"sampler_correction": {"truncate": 2.0}}, "sampler_correction.truncate"),
        ({"sampler_correction": {"low": 0.5}}, "sampler_correction.low"),
        ({"sampler_correction": {"mask": "token", "low": 2.0, "high": 1.0}}, "sampler_correction.low"),
        ({"sampler_correction": {"mask": "token", "low": None, "high": None}}, "sampler_correction.mask"),
    ],
)
def test_a_setting_that_would_be_ignored_is_a_fault(written: dict[str, Any], key: str) -> None:
    assert [fault.key for fault in ObjectiveOptions(**written).contradictions()] == [key]


def test_where_a_default_comes_from() -> None:
    options = ObjectiveOptions(name="dapo", clip_high=0.3).sized(200)
    assert options.origin("clip_dual") == "objective.name: dapo"
    assert options.origin("clip_low") == "objective.loss: clip"
    assert options.origin("dynamic_sampling.max_rounds") == "objective.name: dapo"
    assert options.origin("overlong.buffer_tokens") == "rollout.sampling.max_new_tokens"
    assert options.origin("entropy_coef") is None


@pytest.mark.parametrize(
    ("options", "teaches"),
    [
        (ObjectiveOptions(), False),
        (ObjectiveOptions(kl="k3"), False),  # only measured
        (ObjectiveOptions(kl="k3", kl_coef=0.1), True),
        (ObjectiveOptions(kl="k1", kl_coef=0.1, kl_in="reward"), False),
        (ObjectiveOptions(entropy_coef=0.01), True),
    ],
)
def test_what_teaches_a_token_whose_advantage_is_zero(options: ObjectiveOptions, teaches: bool) -> None:
    assert options.teaches_without_advantage is teaches
