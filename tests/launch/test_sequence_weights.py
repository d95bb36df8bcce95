"""What a response counts for where prompts have different numbers of them, or some are given up: weights, who trains,
and rewards that estimate what they would be without that."""

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.objective import ObjectiveOptions
from launch.run.collect import Round
from launch.run.groups import PromptGroup, natural_mean, training_sequences
from launch.run.record import rollout_metrics
from tests.launch.graded import CUT, GIVEN_UP, group_of, groups_of, stats_of

DUET = ObjectiveOptions(name="duet")


def trained(
    groups: list[PromptGroup], objective: ObjectiveOptions = DUET, asked: int | None = None
) -> list[tuple[int, float]]:
    """(prompt, weight) of what is learned from."""
    sequences, _ = training_sequences(groups, objective, prompts_per_step=9, max_new_tokens=10, asked=asked)
    return [(int(s.prompt_tokens[0]), s.weight) for s in sequences]


def test_without_a_budget_all_weights_are_one_whatever_failed() -> None:
    groups = [group_of([1, 0, 0, 1]), group_of([1, 0], prompt=1)]
    assert {weight for _, weight in trained(groups)} == {1.0}


def test_with_equal_counts_and_nothing_given_up_all_weights_are_exactly_one() -> None:
    for count in (2, 3, 7, 24):
        groups = [group_of([1.0] + [0.0] * (count - 1), prompt=i) for i in range(3)]
        assert {weight for _, weight in trained(groups, asked=3 * count)} == {1.0}


def test_prompts_count_alike_however_many_responses_they_got() -> None:
    """Counts 2 and 6, of a mean of 4."""
    weights = trained(groups_of([1, 0], [1, 0, 0, 0, 0, 0]), asked=8)
    assert weights == [(0, 2.0)] * 2 + [(1, pytest.approx(4 / 6))] * 6


@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.integers(0, 5))
def test_the_weights_of_each_prompt_add_up_to_an_equal_share_of_what_was_asked_for(
    counts: list[int], lost: int
) -> None:
    """Also where responses did not come: their prompt's others stand for them."""
    groups = [group_of([1.0] + [0.0] * (count - 1), prompt=i) for i, count in enumerate(counts)]
    asked = sum(counts) + lost
    sums = defaultdict[int, float](float)
    for prompt, weight in trained(groups, asked=asked):
        sums[prompt] += weight
    assert list(sums.values()) == pytest.approx([asked / len(counts)] * len(counts))


def test_a_response_that_a_coin_let_go_on_counts_for_those_that_it_did_not() -> None:
    group = group_of([1, 0, 0, 1], reasons=[None, GIVEN_UP, GIVEN_UP, CUT], propensities=[1.0, 0.25, 0.25, 0.25])
    sequences, metrics = training_sequences([group], DUET, prompts_per_step=1, max_new_tokens=10, asked=4)
    assert [s.weight for s in sequences] == [1.0, 4.0]
    # Compared with the mean of the other three: those that were given up are among them.
    assert [float(np.asarray(s.advantage)) for s in sequences] == pytest.approx([2 / 3, 2 / 3])
    assert "rollouts/masked" not in metrics


def test_what_was_given_up_is_neither_learned_from_nor_called_masked() -> None:
    group = group_of([1, 0, 0], reasons=[None, GIVEN_UP, CUT])
    options = ObjectiveOptions(mask_truncated=True)
    sequences, metrics = training_sequences([group], options, prompts_per_step=1, max_new_tokens=10, asked=3)
    assert len(sequences) == 1
    assert metrics["rollouts/masked"] == 1


def test_a_group_that_was_given_up_as_a_whole_teaches_nothing() -> None:
    group = group_of([1, 0], reasons=[GIVEN_UP, GIVEN_UP])
    sequences, metrics = training_sequences([group], DUET, prompts_per_step=1, max_new_tokens=10, asked=2)
    assert not sequences
    assert metrics["groups/used"] == 0


def test_the_mean_reward_is_what_it_would_be_without_the_coin_in_expectation() -> None:
    """Two responses to one prompt, both late without an answer; one is right. Over all four outcomes of two coins."""
    keep, total = 0.25, 0.0
    for first in (True, False):
        for second in (True, False):
            chance = (keep if first else 1 - keep) * (keep if second else 1 - keep)
            reasons = [None if went_on else GIVEN_UP for went_on in (first, second)]
            rewards = [1.0 if first else 0.0, 0.0]  # what is given up has no answer
            total += chance * natural_mean([group_of(rewards, reasons=reasons, propensities=[keep, keep])])
    assert total == pytest.approx(0.5)


def test_a_prompt_counts_once_in_the_mean_reward_whatever_its_count() -> None:
    groups = groups_of([1, 1], [0, 0, 0, 0, 0, 0])
    collected = Round(groups=groups, stats=stats_of(8), rollout_s=1.0, reward_wait_s=0.0)
    assert rollout_metrics([collected], uneven=True)["reward/mean"] == 0.5
    assert rollout_metrics([collected], uneven=True)["reward/std"] == 0.5
    assert rollout_metrics([collected])["reward/mean"] == 0.25


def test_a_response_without_a_value_is_not_in_its_mean() -> None:
    groups = groups_of([3, 1], [5])
    for group in groups:
        for member in group.graded:
            if member.grade.value != 1:
                member.grade.parts["form"] = member.grade.value
    assert natural_mean(groups, "form") == 4
    assert math.isnan(natural_mean(groups, "none"))
