"""What public trainers assert of their advantages, shaping and filters, restated with our own numbers.

Each test names whose assertion it is. Where a project does otherwise than the others, or than is done here, the test
says what happens here; the reasons are in docs/concepts/learning.md.
"""

import itertools
import math

import numpy as np
import pytest

from config.objective import Baseline, Normalize
from policies.advantages import batch_advantages, group_advantages, kl_in_reward, whiten
from policies.dynamic_sampling import has_signal, prompts_to_sample
from policies.overlong import overlong_penalties


def scores(groups: list[list[float]], baseline: Baseline, normalize: Normalize = "none") -> list[list[float]]:
    return [group.advantages.tolist() for group in batch_advantages(groups, baseline=baseline, normalize=normalize)]


def test_skyrl_rloo_centres_pairs_by_the_other_one_and_gives_a_single_response_nothing() -> None:
    assert scores([[8.0, 2.0], [5.0, 9.0], [3.0]], "leave_one_out") == [[6.0, -6.0], [-4.0, 4.0], [0.0]]


def test_skyrl_grpo_without_the_std_is_the_distance_from_the_group_mean() -> None:
    assert scores([[8.0, 2.0], [5.0, 9.0]], "group") == [[3.0, -3.0], [-2.0, 2.0]]


def test_skyrl_verl_reinforce_pp_returns_add_up_what_is_still_to_come() -> None:
    """Token rewards 0.5, -1, 2: as KL of -0.5 and 1 under a coefficient of 1, and a last token worth 2."""
    (returns,) = kl_in_reward([2.0], [np.array([-0.5, 1.0, 0.0])], coef=1.0, whitened=False)
    assert returns.tolist() == [1.5, 1.0, 2.0]


def test_verl_openrlhf_reinforce_pp_is_whitened_over_the_tokens_of_all_responses() -> None:
    a, b = kl_in_reward([1.0, 0.0], [np.zeros(3), np.array([0.5, 0.5])], coef=1.0, whitened=True)
    assert np.concatenate([a, b]) == pytest.approx(whiten([1.0, 1.0, 1.0, -1.0, -0.5]), rel=1e-12)
    assert a.tolist() == [a[0]] * 3
    assert kl_in_reward([], [], coef=1.0, whitened=True) == []


@pytest.mark.parametrize("seed", range(3))
def test_verl_rloo_and_grpo_per_group_equal_their_vectorised_form(seed: int) -> None:
    """A hundred responses in groups of random size, at least two each, in shuffled order."""
    rng = np.random.default_rng(seed)
    of = np.concatenate([np.repeat(np.arange(8), 2), rng.integers(0, 8, 84)])
    rng.shuffle(of)
    rewards = rng.normal(size=of.size)
    count = np.bincount(of)[of]
    total = np.bincount(of, rewards)[of]
    mean = total / count
    std = np.sqrt(np.bincount(of, (rewards - mean) ** 2)[of] / (count - 1))
    groups = [rewards[of == g].tolist() for g in range(8)]
    order = np.argsort(of, kind="stable")
    for baseline, normalize, whole in (
        ("leave_one_out", "none", count / (count - 1) * (rewards - mean)),
        ("group", "group", (rewards - mean) / (std + 1e-6)),
    ):
        made = scores(groups, baseline, normalize)
        assert [a for group in made for a in group] == pytest.approx(whole[order], rel=1e-9, abs=1e-12)


def test_verl_grpo_of_rewards_that_differ_little_is_no_rounding() -> None:
    """1 and 1.00001: std 7.07e-6, to which 1e-6 is added, so 0.62 instead of 0.71."""
    (low, high), (other_low, other_high) = scores([[1.0, 1.00001], [2.0, 2.00001]], "group", "group")
    assert high == pytest.approx(5e-6 / (1e-5 / math.sqrt(2) + 1e-6), rel=1e-6)
    assert (low, other_high) == pytest.approx((-high, high), rel=1e-6)
    assert other_low == pytest.approx(-other_high, rel=1e-9)


def test_verl_grpo_and_rloo_give_a_single_response_its_reward_and_here_it_teaches_nothing() -> None:
    """SkyRL, NeMo-RL and prime-rl give it 0 as well; verl's 0.7 would push a response without any baseline."""
    for baseline in ("group", "leave_one_out"):
        assert scores([[0.7]], baseline) == [[0.0]]
    assert scores([[0.7]], "none") == [[0.7]]  # where no baseline is asked for, it is as in verl


def test_verl_remax_with_a_baseline_of_nothing_is_the_reward() -> None:
    assert scores([[1.0, 0.0], [0.5]], "none") == [[1.0, 0.0], [0.5]]


def test_verl_opo_with_responses_of_one_length_is_the_group_mean() -> None:
    """OPO weighs a group's mean by lengths; ours does not, so the two meet where lengths do not differ."""
    assert scores([[3.0, 1.0, 2.0]], "group") == [[1.0, -1.0, 0.0]]


class Policy:
    """Three binary tokens with a logit each; everything about it can be enumerated. Rewards differ by position."""

    def __init__(self) -> None:
        p = 1 / (1 + np.exp(-np.array([0.7, -0.4, 0.1])))
        self.responses = np.array(list(itertools.product((0, 1), repeat=3)), dtype=float)
        self.chances = np.prod(np.where(self.responses == 1, p, 1 - p), axis=1)
        self.scores = self.responses - p  # d log pi / d logit, [8, 3]
        self.rewards = self.responses @ np.array([3.0, 1.0, -2.0])

    @property
    def gradient(self) -> np.ndarray:
        return (self.chances * self.rewards) @ self.scores

    def estimated(self, n: int, baseline: Baseline, normalize: Normalize = "none") -> np.ndarray:
        """The exact expectation over all groups of n, by multisets and how often each occurs."""
        total = np.zeros(3)
        for chosen in itertools.combinations_with_replacement(range(8), n):
            times = math.factorial(n)
            for index in set(chosen):
                times //= math.factorial(chosen.count(index))
            (group,) = scores([self.rewards[list(chosen)].tolist()], baseline, normalize)
            chance = times * math.prod(self.chances[i] for i in chosen)
            total += chance * (np.array(group) @ self.scores[list(chosen)]) / n
        return total


@pytest.mark.parametrize("baseline", ["leave_one_out", "none"])
def test_verl_rloo_and_a_constant_baseline_have_exactly_the_true_gradient(baseline: Baseline) -> None:
    policy = Policy()
    assert policy.estimated(4, baseline) == pytest.approx(policy.gradient, abs=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_verl_dr_grpo_has_the_true_direction_and_n_minus_1_over_n_of_its_length(n: int) -> None:
    policy = Policy()
    assert policy.estimated(n, "group") == pytest.approx((n - 1) / n * policy.gradient, abs=1e-12)


def test_verl_grpo_with_the_std_turns_the_gradient() -> None:
    policy = Policy()
    assert np.ptp(policy.estimated(4, "group") / policy.gradient) < 1e-9
    assert np.ptp(policy.estimated(4, "group", "group") / policy.gradient) > 1e-3


def test_prime_rl_subtracts_the_mean_of_each_problem_and_leaves_rewards_alone_without_a_baseline() -> None:
    rewards = [[0.0, 1.0], [0.25, 0.25]]
    assert scores(rewards, "group") == [[-0.5, 0.5], [0.0, 0.0]]
    assert scores(rewards, "none") == rewards


def test_prime_rl_normalised_over_the_batch_sums_to_nothing_and_survives_equal_rewards() -> None:
    made = scores([[2.0, 1.0, 1.0], [0.0, 2.0, 0.0]], "group", "whiten")
    assert sum(map(sum, made)) == pytest.approx(0, abs=1e-12)
    assert scores([[2.0, 2.0, 2.0]], "group", "whiten") == [[0.0] * 3]
    assert scores([[1.0], [0.0], [0.5]], "group", "whiten") == [[0.0]] * 3  # one per problem: nothing, and no nan


def test_nemo_rl_does_not_divide_what_does_not_vary() -> None:
    assert scores([[3.0, 3.0], [0.0, 1.0]], "none", "group") == [[3.0, 3.0], [0.0, pytest.approx(2**0.5, rel=1e-5)]]
    for normalize in ("group", "batch", "whiten"):
        assert scores([[3.0, 3.0]], "leave_one_out", normalize) == [[0.0, 0.0]]


def test_nemo_rl_leave_one_out_baseline_is_the_mean_of_the_others() -> None:
    rewards = [1.0, 2.0, 6.0]
    (got,) = scores([rewards], "leave_one_out")
    assert (np.array(rewards) - got).tolist() == [4.0, 3.5, 1.5]


def test_trl_rloo_is_the_group_mean_stretched() -> None:
    """(r - mean) * n / (n - 1), as TRL computes it, is the definition by the mean of the others."""
    rewards = np.array([0.2, 1.0, 0.4, 0.0])
    (got,) = scores([rewards.tolist()], "leave_one_out")
    assert got == pytest.approx((rewards - rewards.mean()) * 4 / 3, rel=1e-12)


def test_trl_scale_rewards_by_batch_takes_the_mean_of_the_group_and_the_std_of_all() -> None:
    """Rewards 0 1 1 1: std 0.5 of all four (TRL adds 1e-4 to it, here it is 1e-6)."""
    assert scores([[0.0, 1.0], [1.0, 1.0]], "group", "batch") == [
        [pytest.approx(-1.0, rel=1e-5), pytest.approx(1.0, rel=1e-5)],
        [0.0, 0.0],
    ]


def test_slime_reinforce_pp_baseline_is_whitened_with_every_token_counting_once() -> None:
    long, short = [4, 4], [1, 1]
    (a, b), (c, d) = (
        group.advantages.tolist()
        for group in batch_advantages([[1.0, 0.0], [1.0, 0.0]], [long, short], baseline="group", normalize="whiten")
    )
    assert (a, b) == (c, d)  # the same distance from the mean is the same advantage, however long
    assert a == pytest.approx(0.5 / (10 * 0.25 / 9) ** 0.5, rel=1e-6)  # variance over ten tokens, with 9 below


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused_by_name_where_others_go_on(bad: float) -> None:
    with pytest.raises(ValueError, match="reward 1 of the group is"):
        group_advantages([0.0, bad], normalize_std=False, baseline="leave_one_out")


def test_nemo_rl_verl_dapo_takes_nothing_before_the_buffer_and_falls_linearly_in_it() -> None:
    """At most 40 tokens, buffer 8: up to 32 nothing, at 34 a quarter, at 40 all of the penalty."""
    got = overlong_penalties([5, 32, 34, 40], max_tokens=40, buffer_tokens=8, penalty=0.6)
    assert got == pytest.approx([0.0, 0.0, -0.15, -0.6])
    assert np.array([1.0, 0.8, 0.6, 0.4]) + got == pytest.approx([1.0, 0.8, 0.45, -0.2])


def test_dapo_eq_13_ends_at_the_penalty_where_verl_and_nemo_rl_would_fall_on() -> None:
    assert overlong_penalties([48], max_tokens=40, buffer_tokens=8, penalty=0.6).tolist() == [-0.6]


@pytest.mark.parametrize("buffer_tokens", [0, 41, -1])
def test_nemo_rl_a_buffer_that_cannot_be_is_refused(buffer_tokens: int) -> None:
    with pytest.raises(ValueError, match="it must be in 1"):
        overlong_penalties([5], max_tokens=40, buffer_tokens=buffer_tokens, penalty=1.0)


def test_verl_dapo_the_filter_keeps_groups_that_are_not_all_alike() -> None:
    assert not has_signal([1.0, 1.0], 2)
    assert not has_signal([0.0, 0.0, 0.0], 3)
    assert has_signal([0.0, 1.0], 2)
    assert not has_signal([1.0], 1)
    assert not has_signal([], 0)
    assert not has_signal([0.0, 1.0], 0)  # both were cut, and cut ones do not train


def test_verl_dapo_rounds_go_on_until_the_batch_is_full() -> None:
    """verl samples a whole batch in every round; here a round is as large as the share of hits so far asks for."""
    assert prompts_to_sample(16, 16, 16) == 0
    assert prompts_to_sample(16, 20, 32) == 0
    assert prompts_to_sample(16, 0, 16) == 16  # no hit yet: as many again
    assert prompts_to_sample(16, 12, 16) == 6  # 4 missing, 3 of 4 hit: 5.33
    assert prompts_to_sample(16, 1, 16) == 16  # never more than a whole batch
    assert prompts_to_sample(2, 1, 2) == 2
