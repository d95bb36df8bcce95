"""Budgets that cannot be kept to, or would be ignored, are refused, each with its key and what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from launch.config import ConfigError, load_config
from launch.config.bias import biases_of

Write = Callable[..., Path]
PREFIX = "rollout.budget"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["min_rollouts=3"], "min_rollouts", "there is no budget"),
        (["max_rollouts=9"], "max_rollouts", "there is no budget"),
        (["share=0.5", "tokens_per_step=9999"], "share", "leave one of them out"),
        (["share=0.2"], "share", "0.2 of rollout.rollouts_per_prompt=8 is 1.6 to each prompt"),
        (["share=1.0", "min_rollouts=9"], "share", "lower rollout.budget.min_rollouts"),
        (["tokens_per_step=20"], "tokens_per_step", "16 prompts get 2 responses each at least, which is 32"),
        (["tokens_per_step=9999", "max_rollouts=3", "min_rollouts=4"], "max_rollouts", "less than"),
        (["share=1.0", "max_rollouts=7"], "max_rollouts", "less than the budget"),
        (["tokens_per_step=9999", "min_rollouts=33"], "min_rollouts", "4 x rollout.rollouts_per_prompt = 32"),
    ],
)
def test_a_budget_that_cannot_be_kept_to_is_refused(
    write_config: Write, overrides: list[str], key: str, said: str
) -> None:
    base = ["rollout.rollouts_per_prompt=8", "rollout.prompts_per_step=16"]
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(), [*base, *(f"{PREFIX}.{each}" for each in overrides)])
    assert [issue.key for issue in caught.value.issues] == [f"{PREFIX}.{key}"]
    assert said in str(caught.value)


def test_a_budget_has_no_further_rounds_and_what_is_advised_helps(write_config: Write) -> None:
    overrides = ["objective.name=dapo", f"{PREFIX}.share=0.5"]
    with pytest.raises(ConfigError, match=r"rollout.budget is spent in one round"):
        load_config(write_config(), overrides)
    with pytest.raises(ConfigError, match=r"set objective.dynamic_sampling.max_rounds=1, or rollout.budget=\{\};"):
        load_config(write_config(), overrides)
    load_config(write_config(), [*overrides, "objective.dynamic_sampling.max_rounds=1"])
    load_config(write_config(), ["objective.name=dapo", "rollout.budget={}"])


@pytest.mark.parametrize("name", ["systems/duet", "systems/everything", "cluster/qwen2.5-32b-8x8xh100"])
def test_examples_that_say_their_gradient_stays_unbiased_are_not_called_biased(name: str) -> None:
    config = load_config(ROOT / f"examples/{name}.yaml").config
    assert config.learner.mini_batches > 1
    assert biases_of(config) == []


def test_one_rollout_per_prompt_is_not_answered_with_fewer_than_two(write_config: Write) -> None:
    overrides = ["rollout.rollouts_per_prompt=1", "objective.name=reinforce_pp", f"{PREFIX}.share=0.5"]
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(), overrides)
    (issue,) = caught.value.issues
    assert (issue.key, issue.remedy) == (f"{PREFIX}.share", "raise rollout.rollouts_per_prompt to 4")
    load_config(write_config(), ["rollout.rollouts_per_prompt=4", *overrides[1:]])


def test_mini_batches_are_counted_by_what_the_budget_leaves(write_config: Write) -> None:
    base = ["rollout.rollouts_per_prompt=8", "rollout.prompts_per_step=16", f"{PREFIX}.share=0.5"]
    load_config(write_config(), [*base, "learner.mini_batches=64"])
    with pytest.raises(ConfigError, match="16 x 4 = 64 rollouts per RL step"):
        load_config(write_config(), [*base, "learner.mini_batches=65"])


@pytest.mark.parametrize(
    ("section", "key", "refused"), [("abort", "enabled=false", "marker"), ("budget", "share=null", "max_rollouts")]
)
def test_an_empty_section_by_override_switches_off_what_a_file_has_several_keys_of(
    section: str, key: str, refused: str
) -> None:
    """What the remedies advise."""
    path = ROOT / "examples/systems/duet.yaml"
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"rollout.{section}.{key}"])
    (issue,) = caught.value.issues
    assert issue.key == f"rollout.{section}.{refused}"
    advised = f"rollout.{section}={{}}"
    assert advised in issue.remedy
    rollout = load_config(path, [advised]).config.rollout
    assert (rollout.abort.enabled, rollout.budget.on) == (section != "abort", section != "budget")


@pytest.mark.parametrize("overrides", [["share=0.25"], ["share=1.0", "max_rollouts=8"], ["tokens_per_step=9999"]])
def test_a_budget_that_can_be_kept_to_is_not_refused(write_config: Write, overrides: list[str]) -> None:
    base = ["rollout.rollouts_per_prompt=8", "rollout.prompts_per_step=16"]
    load_config(write_config(), [*base, *(f"{PREFIX}.{each}" for each in overrides)])
