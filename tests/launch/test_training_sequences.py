"""Which groups and responses of a step the learner gets, and with which advantages."""

import numpy as np
import pytest

from config.objective import DynamicSamplingOptions, ObjectiveOptions, OverlongOptions
from contracts.training import TrainSequence
from launch.run.groups import training_sequences, with_kl
from tests.launch.graded import CUT, group_of, groups_of

MAX_TOKENS = 10
DYNAMIC = DynamicSamplingOptions(max_rounds=3)


def learned(
    groups: list[object], objective: ObjectiveOptions, prompts: int = 100
) -> tuple[list[TrainSequence], dict[str, float]]:
    return training_sequences(
        groups,
        objective,
        prompts_per_step=prompts,
        max_new_tokens=MAX_TOKENS,
    )


def advantages(sequences: list[TrainSequence]) -> list[float]:
    return [float(np.asarray(s.advantage)) for s in sequences]


@pytest.mark.parametrize(
    ("objective", "used"),
    [
        (ObjectiveOptions(), 1),
        (ObjectiveOptions(kl="k3", kl_coef=0.0), 1),  # only measured: no gradient
        (ObjectiveOptions(kl="k3", kl_coef=0.1), 2),
        (ObjectiveOptions(drop_zero_variance=False), 2),
    ],
)
def test_a_group_of_equal_rewards_is_kept_where_its_loss_has_a_gradient(objective: ObjectiveOptions, used: int) -> None:
    sequences, metrics = learned(groups_of([1.0, 0.0], [1.0, 1.0]), objective)
    assert metrics["groups/used"] == used
    assert metrics["groups/zero_variance"] == 1
    assert [s.advantage for s in sequences[2:]] == [0.0, 0.0][: 2 * (used - 1)]


def test_each_response_goes_with_its_tokens_log_probs_and_worker() -> None:
    groups = groups_of([1.0, 0.0], [0.0, 1.0])
    sequences, _ = learned(groups, ObjectiveOptions(normalize="none"))
    assert advantages(sequences) == [0.5, -0.5, -0.5, 0.5]
    members = [member for group in groups for member in group.members]
    for got, member in zip(sequences, members, strict=True):
        assert got.response_tokens is member.rollout.tokens
        assert got.sampler_logprobs is member.rollout.logprobs
        assert got.sampler_logprobs_t1 is member.rollout.logprobs_t1
        assert got.sampler == member.worker


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (ObjectiveOptions(name="rloo"), [1.0, -1.0, 2.0, -1.0, -1.0]),
        (ObjectiveOptions(name="dr_grpo"), [0.5, -0.5, 4 / 3, -2 / 3, -2 / 3]),
        (ObjectiveOptions(name="reinforce"), [0.4, -0.6, 1.4, -0.6, -0.6]),  # mean of all five: 0.6
    ],
)
def test_the_objective_chooses_the_estimator(objective: ObjectiveOptions, expected: list[float]) -> None:
    sequences, _ = learned(groups_of([1.0, 0.0], [2.0, 0.0, 0.0]), objective)
    assert advantages(sequences) == pytest.approx(expected)


def test_with_a_baseline_of_the_batch_equal_rewards_teach_and_a_single_response_too() -> None:
    sequences, metrics = learned(groups_of([1.0, 1.0], [0.0]), ObjectiveOptions(name="reinforce"))
    assert advantages(sequences) == pytest.approx([1 / 3, 1 / 3, -2 / 3])
    assert (metrics["groups/varied"], metrics["groups/used"], metrics["groups/ungraded"]) == (2, 2, 0)
    assert metrics["groups/zero_variance"] == 2  # in themselves
    _, nothing = learned(groups_of([1.0, 1.0], [1.0]), ObjectiveOptions(name="reinforce"))
    assert nothing["groups/varied"] == 0


@pytest.mark.parametrize("kl", ["none", "k1"])
def test_single_responses_are_whitened_with_those_of_other_prompts(kl: str) -> None:
    """So one of reward 0 teaches too, KL in the reward or not; where all are equal none does."""
    more = {"kl_coef": 0.1} if kl == "k1" else {}
    objective = ObjectiveOptions.model_validate({"name": "reinforce_pp", "kl": kl, **more})
    assert learned(groups_of([1.0], [0.0], [0.0]), objective)[1]["groups/varied"] == 3
    assert learned(groups_of([1.0], [1.0]), objective)[1]["groups/varied"] == 0
    assert learned([], objective)[1]["groups/varied"] == 0


def test_a_long_response_loses_part_of_its_reward_and_reports_keep_the_grade() -> None:
    """Limit 10, buffer 5, penalty 0.5: at 7 tokens two fifths of it, at 10 all."""
    group = group_of([1.0, 1.0, 0.0], lengths=[5, 7, 10])
    objective = ObjectiveOptions(normalize="none", overlong=OverlongOptions(buffer_tokens=5, penalty=0.5))
    sequences, metrics = learned([group], objective)
    shaped = np.array([1.0, 0.8, -0.5])
    assert advantages(sequences) == pytest.approx(shaped - shaped.mean())
    assert metrics["overlong/share"] == pytest.approx(2 / 3)
    assert metrics["overlong/penalty"] == pytest.approx(0.7 / 3)
    assert metrics["overlong/reward"] == pytest.approx(shaped.mean())
    assert [member.grade.value for member in group.members] == [1.0, 1.0, 0.0]


def test_the_longer_of_two_right_responses_is_worth_less_and_wrong_ones_stay_what_they_are() -> None:
    group = group_of([1.0, 1.0, 0.0], lengths=[4, 8, 10])
    sequences, metrics = learned([group], ObjectiveOptions(normalize="none", length_penalty=0.1))
    shaped = np.array([np.exp(0.1), np.exp(-0.1), 0.0])
    assert advantages(sequences) == pytest.approx(shaped - shaped.mean())
    assert metrics["length_penalty/reward"] == pytest.approx(shaped.mean())
    for alone in (group_of([1.0, 0.0], lengths=[4, 8]), group_of([1.0, 0.0, 1.0], lengths=[4, 8, 4])):
        rewards = [member.grade.value for member in alone.members]
        sequences, _ = learned([alone], ObjectiveOptions(normalize="none", length_penalty=0.1))
        assert advantages(sequences) == pytest.approx(np.array(rewards) - np.mean(rewards))


def test_equal_grades_of_different_length_are_signal_once_they_are_shaped() -> None:
    objective = ObjectiveOptions(overlong=OverlongOptions(buffer_tokens=5))
    _, metrics = learned([group_of([1.0, 1.0], lengths=[5, 10])], objective)
    assert (metrics["groups/used"], metrics["groups/zero_variance"]) == (1, 0)


def test_without_shaping_or_masking_there_is_no_metric_of_it() -> None:
    _, metrics = learned(groups_of([1.0, 0.0]), ObjectiveOptions())
    assert {name.partition("/")[0] for name in metrics} == {"groups"}


def test_a_cut_response_counts_in_the_baseline_and_does_not_train() -> None:
    group = group_of([1.0, 0.0, 0.0], reasons=[None, CUT, None])
    sequences, metrics = learned([group], ObjectiveOptions(normalize="none", mask_truncated=True))
    assert advantages(sequences) == pytest.approx([2 / 3, -1 / 3])
    assert metrics["rollouts/masked"] == 1
    kept, _ = learned([group], ObjectiveOptions(normalize="none"))
    assert advantages(kept) == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_a_group_of_cut_responses_is_not_used() -> None:
    group = group_of([1.0, 0.0], reasons=[CUT, CUT])
    sequences, metrics = learned([group], ObjectiveOptions(mask_truncated=True))
    assert not sequences
    assert (metrics["groups/used"], metrics["rollouts/masked"]) == (0, 2)


def test_what_is_whitened_is_what_trains() -> None:
    """The tokens of a cut response are not in the batch's statistics."""
    group = group_of([1.0, 9.0, 0.0], lengths=[2, 10, 2], reasons=[None, CUT, None])
    objective = ObjectiveOptions(name="reinforce_pp", kl="none", mask_truncated=True)
    sequences, _ = learned([group], objective)
    assert advantages(sequences) == pytest.approx([0.75**0.5, -(0.75**0.5)], rel=1e-6)


def test_dynamic_sampling_keeps_the_first_groups_with_signal_in_their_order() -> None:
    groups = groups_of([1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 2.0])
    sequences, metrics = learned(groups, ObjectiveOptions(normalize="none", dynamic_sampling=DYNAMIC), prompts=2)
    assert advantages(sequences) == [0.5, -0.5, -0.5, 0.5]
    assert [int(s.prompt_tokens[0]) for s in sequences] == [1, 1, 3, 3]
    assert (metrics["groups/total"], metrics["groups/used"], metrics["groups/surplus"]) == (5, 2, 1)
    assert (metrics["groups/varied"], metrics["groups/zero_variance"]) == (3, 2)


def test_dynamic_sampling_judges_by_grades_and_not_by_lengths() -> None:
    """DAPO's condition is on right and wrong; without it the same group would train, by its lengths."""
    group = group_of([1.0, 1.0], lengths=[5, 10])
    overlong = OverlongOptions(buffer_tokens=5)
    sequences, metrics = learned([group], ObjectiveOptions(overlong=overlong, dynamic_sampling=DYNAMIC))
    assert not sequences
    assert metrics["groups/varied"] == 0


def test_what_dynamic_sampling_leaves_out_is_not_in_the_batchs_statistics() -> None:
    objective = ObjectiveOptions(baseline="batch", normalize="none", dynamic_sampling=DYNAMIC)
    sequences, _ = learned(groups_of([9.0, 9.0], [1.0, 0.0]), objective)
    assert advantages(sequences) == [0.5, -0.5]


def test_kl_in_the_reward_is_taken_token_by_token_before_anything_is_whitened() -> None:
    """KL 1 for each of two tokens, coefficient 0.5: the first token bears both, the last one its own."""
    group = group_of([1.0, 0.0], lengths=[2, 1])
    objective = ObjectiveOptions(baseline="none", normalize="none", kl="k1", kl_in="reward", kl_coef=0.5)
    kl = [np.ones(2, np.float32), np.zeros(1, np.float32)]
    sequences, metrics = with_kl(learned([group], objective)[0], kl, objective)
    assert [np.asarray(s.advantage).tolist() for s in sequences] == [[0.0, 0.5], [0.0]]
    assert metrics == {"kl": pytest.approx(2 / 3)}
    assert with_kl([], [], objective) == ([], {})


def test_with_kl_in_the_reward_whitening_is_over_what_it_left() -> None:
    objective = ObjectiveOptions(name="reinforce_pp", kl_coef=0.5)
    before = learned([group_of([1.0, 0.0], lengths=[2, 1])], objective)[0]
    assert advantages(before) == [1.0, 0.0]
    sequences, _ = with_kl(before, [np.ones(2, np.float32), np.zeros(1, np.float32)], objective)
    got = np.concatenate([np.asarray(s.advantage) for s in sequences])
    assert got == pytest.approx(np.array([-1, 2, -1]) / 3**0.5, rel=1e-6)  # 0, 0.5, 0: mean 1/6, variance 1/12


def test_kl_in_the_reward_teaches_a_group_of_equal_rewards() -> None:
    objective = ObjectiveOptions(kl="k1", kl_in="reward", kl_coef=0.5)
    assert learned(groups_of([1.0, 1.0]), objective)[1]["groups/used"] == 1
