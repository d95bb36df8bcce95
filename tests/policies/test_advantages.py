"""Advantages against numbers worked out by hand, their invariances, and their expected gradients by enumeration."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.objective import Baseline, Normalize
from policies.advantages import EPSILON, GroupAdvantages, batch_advantages, group_advantages, whiten

REWARDS = st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=16)
GROUPS = st.lists(st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=8), min_size=1, max_size=6)
BASELINES: list[Baseline] = ["group", "leave_one_out", "batch", "none"]
NORMALIZE: list[Normalize] = ["none", "group", "batch", "whiten"]


def flat(groups: list[GroupAdvantages]) -> list[float]:
    return [float(a) for group in groups for a in group.advantages]


def test_by_hand() -> None:
    # mean 0.25; squared deviations 0.0625 * 3 + 0.5625 = 0.75; std = sqrt(0.75 / 3) = 0.5
    got = group_advantages([0.0, 1.0, 0.0, 0.0], normalize_std=True)
    assert got.mean == 0.25
    assert got.std == 0.5
    assert got.advantages == pytest.approx(np.array([-0.5, 1.5, -0.5, -0.5]) * 0.5 / (0.5 + EPSILON), rel=1e-15)
    assert not got.zero_variance


def test_without_normalisation_is_the_centred_reward() -> None:
    got = group_advantages([0.0, 1.0, 0.0, 0.0], normalize_std=False)
    assert got.advantages.tolist() == [-0.25, 0.75, -0.25, -0.25]


def test_leave_one_out_by_hand() -> None:
    """Of 6, 3 and 0 the others' means are 1.5, 3 and 4.5; a group of two has the other one's reward as its baseline."""
    assert group_advantages([6.0, 3.0, 0.0], normalize_std=False, baseline="leave_one_out").advantages.tolist() == [
        4.5,
        0.0,
        -4.5,
    ]
    pair = group_advantages([6.0, 3.0], normalize_std=False, baseline="leave_one_out")
    assert pair.advantages.tolist() == [3.0, -3.0]
    assert (pair.mean, pair.std) == (4.5, pytest.approx(4.5**0.5))


def test_leave_one_out_divided_by_the_groups_std() -> None:
    got = group_advantages([0.0, 1.0, 0.0, 0.0], normalize_std=True, baseline="leave_one_out").advantages
    assert got == pytest.approx(np.array([-1, 3, -1, -1]) / 3 / (0.5 + EPSILON), rel=1e-15)


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0], [7.0], [0.1 + 0.2, 0.3], [1e6, 1e6 + 1e-5]])
def test_equal_rewards_are_reported_and_teach_nothing(rewards: list[float], baseline: Baseline) -> None:
    (got,) = batch_advantages([rewards], baseline=baseline, normalize="group")
    assert got.zero_variance
    assert not got.advantages.any()


def test_a_small_but_real_spread_is_signal() -> None:
    got = group_advantages([0.0, 1e-3], normalize_std=True)
    assert not got.zero_variance
    assert got.advantages == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=2e-3)


def test_bad_rewards_are_named() -> None:
    with pytest.raises(ValueError, match="reward 1 of the group is nan"):
        group_advantages([0.0, float("nan")], normalize_std=True)
    with pytest.raises(ValueError, match="at least one reward"):
        group_advantages([], normalize_std=True)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_reward_of_a_batch_is_named_with_its_group(baseline: Baseline, normalize: Normalize, bad: float) -> None:
    with pytest.raises(ValueError, match=rf"group 1: reward 2 of the group is {bad}"):
        batch_advantages([[0.0, 1.0], [0.0, 1.0, bad]], baseline=baseline, normalize=normalize)


def test_a_batch_without_groups_has_no_advantages() -> None:
    assert batch_advantages([], baseline="group", normalize="whiten") == []


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("none", [1.0, 0.0, 4.0, 4.0, 1.0]),
        ("batch", [-1.0, -2.0, 2.0, 2.0, -1.0]),  # mean of all five: 2
        ("group", [0.5, -0.5, 1.0, 1.0, -2.0]),
        ("leave_one_out", [1.0, -1.0, 1.5, 1.5, -3.0]),
    ],
)
def test_baselines_over_groups_of_different_size(baseline: Baseline, expected: list[float]) -> None:
    made = batch_advantages([[1.0, 0.0], [4.0, 4.0, 1.0]], baseline=baseline, normalize="none")
    assert flat(made) == expected
    assert [(group.mean, group.zero_variance) for group in made] == [(0.5, False), (3.0, False)]


def test_divided_by_the_batchs_std() -> None:
    """Rewards 1, 0, 4, 4, 1: deviations from 2 squared are 1, 4, 4, 4, 1; std = sqrt(14 / 4)."""
    made = batch_advantages([[1.0, 0.0], [4.0, 4.0, 1.0]], baseline="group", normalize="batch")
    assert flat(made) == pytest.approx(np.array([0.5, -0.5, 1.0, 1.0, -2.0]) / (3.5**0.5 + EPSILON), rel=1e-15)


def test_whitened_over_responses_and_over_tokens() -> None:
    """0 and 3: mean 1.5, variance 4.5. As two tokens and one: mean 1, variance (1 + 1 + 4) / 2 = 3."""
    assert whiten([0.0, 3.0]) == pytest.approx(np.array([-1.5, 1.5]) / 4.5**0.5, rel=1e-8)
    assert whiten([0.0, 3.0], [2, 1]) == pytest.approx(np.array([-1.0, 2.0]) / 3**0.5, rel=1e-8)
    assert whiten([0.0, 3.0], [2, 1]) == pytest.approx(whiten([0.0, 0.0, 3.0])[1:], rel=1e-12)


def test_what_has_no_tokens_is_whitened_by_what_the_others_are() -> None:
    assert whiten([0.0, 3.0, 9.0], [2, 1, 0]) == pytest.approx(np.array([-1.0, 2.0, 8.0]) / 3**0.5, rel=1e-8)
    assert not whiten([1.0, 1.0, 9.0], [2, 1, 0]).any()
    assert not whiten([1.0, 2.0], [0, 0]).any()


def test_reinforce_pp_and_its_variant_with_a_baseline() -> None:
    groups, lengths = [[1.0, 0.0], [1.0, 1.0]], [[2, 1], [1, 2]]
    plain = batch_advantages(groups, lengths, baseline="none", normalize="whiten")
    # tokens 1 1 0 1 1 1: mean 5/6, variance (5/36 + 25/36) / 5 = 1/6
    assert flat(plain) == pytest.approx(np.array([1, -5, 1, 1]) / 6 * 6**0.5, rel=1e-7)
    assert [group.zero_variance for group in plain] == [False, True]  # by its rewards; it has an advantage here
    based = batch_advantages(groups, lengths, baseline="group", normalize="whiten")
    # tokens .5 .5 -.5 0 0 0: mean 1/12, sum of squares 3/4, variance (3/4 - 6/144) / 5 = 17/120
    scale = (120 / 17) ** 0.5
    assert flat(based) == pytest.approx(np.array([5 / 12, -7 / 12, -1 / 12, -1 / 12]) * scale, rel=1e-6)


def test_lengths_must_fit_the_rewards() -> None:
    with pytest.raises(ValueError, match=r"\[2\] rewards by group, but \[3\] lengths"):
        batch_advantages([[0.0, 1.0]], [[1, 2, 3]], baseline="none", normalize="whiten")
    with pytest.raises(ValueError, match="finite and not negative"):
        whiten([0.0, 1.0], [-1, 2])
    with pytest.raises(ValueError, match="one weight for each"):
        whiten([])


@pytest.mark.parametrize("baseline", ["batch", "none"])
def test_a_group_of_equal_rewards_is_not_divided_by_nothing(baseline: Baseline) -> None:
    made = batch_advantages([[2.0, 2.0], [0.0, 2.0]], baseline=baseline, normalize="group")
    assert np.abs(flat(made)).max() <= 2.0


@given(
    st.lists(st.integers(-5, 5), min_size=2, max_size=16).filter(lambda r: len(set(r)) > 1),
    st.floats(-10, 10),
    st.floats(0.5, 10),
)
def test_shift_and_scale_of_the_reward_do_not_matter(rewards: list[int], shift: float, scale: float) -> None:
    base = group_advantages([float(r) for r in rewards], normalize_std=True)
    moved = group_advantages([scale * r + shift for r in rewards], normalize_std=True)
    assert moved.advantages == pytest.approx(base.advantages, abs=1e-5)
    assert float(base.advantages.sum()) == pytest.approx(0, abs=1e-9)
    assert float((base.advantages**2).sum()) == pytest.approx(len(rewards) - 1, rel=1e-4)


@given(REWARDS)
def test_leave_one_out_is_its_definition_sums_to_nothing_and_stretches_the_group_mean(rewards: list[float]) -> None:
    n = len(rewards)
    got = group_advantages(rewards, normalize_std=False, baseline="leave_one_out").advantages
    slow = [r - sum(rewards[:i] + rewards[i + 1 :]) / (n - 1) for i, r in enumerate(rewards)]
    assert got == pytest.approx(slow, abs=1e-12)
    assert float(got.sum()) == pytest.approx(0, abs=1e-9)
    centred = group_advantages(rewards, normalize_std=False).advantages
    assert got == pytest.approx(n / (n - 1) * centred, abs=1e-9)


@given(GROUPS, st.sampled_from(BASELINES), st.sampled_from(NORMALIZE), st.randoms(use_true_random=False))
def test_order_of_groups_and_of_responses_does_not_matter(
    groups: list[list[float]], baseline: Baseline, normalize: Normalize, random: object
) -> None:
    shuffle = random.sample  # type: ignore[attr-defined]
    order = shuffle(range(len(groups)), len(groups))
    inner = [shuffle(range(len(group)), len(group)) for group in groups]
    moved = [[groups[g][i] for i in inner[g]] for g in order]
    base = batch_advantages(groups, baseline=baseline, normalize=normalize)
    got = batch_advantages(moved, baseline=baseline, normalize=normalize)
    for place, g in enumerate(order):
        assert got[place].advantages == pytest.approx(base[g].advantages[inner[g]], abs=1e-9)


@given(GROUPS, st.sampled_from(["group", "leave_one_out"]), st.sampled_from(["none", "group"]))
def test_a_groups_own_estimators_know_nothing_of_the_other_groups(
    groups: list[list[float]], baseline: Baseline, normalize: Normalize
) -> None:
    """Bit for bit, whatever else is in the batch."""
    together = batch_advantages(groups, baseline=baseline, normalize=normalize)
    alone = [batch_advantages([group], baseline=baseline, normalize=normalize)[0] for group in groups]
    assert flat(together) == flat(alone)


@given(GROUPS)
def test_whitened_rewards_have_mean_0_and_variance_1(groups: list[list[float]]) -> None:
    got = np.array(flat(batch_advantages(groups, baseline="none", normalize="whiten")))
    assert float(got.mean()) == pytest.approx(0, abs=1e-9)
    assert not got.any() or float(got.var(ddof=1)) == pytest.approx(1, rel=1e-6)


# Expected gradients, exactly: every outcome of a group of responses, each right with probability sigmoid(theta).


def gradient(p: float, n: int, baseline: Baseline, normalize: Normalize) -> float:
    """E of 1/n sum_i A_i d log pi(x_i) / d theta, for rewards 3 (right) and 1 (wrong)."""
    total = 0.0
    for outcome in itertools.product((0, 1), repeat=n):
        chance = math.prod(p if right else 1 - p for right in outcome)
        advantages = flat(batch_advantages([[1.0 + 2 * x for x in outcome]], baseline=baseline, normalize=normalize))
        total += chance * sum(a * (x - p) for a, x in zip(advantages, outcome, strict=True)) / n
    return total


def true_gradient(p: float) -> float:
    """d/dtheta of 1 + 2 p, with p' = p (1 - p)."""
    return 2 * p * (1 - p)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_leave_one_out_is_unbiased_for_every_group_size(p: float, n: int) -> None:
    assert gradient(p, n, "leave_one_out", "none") == pytest.approx(true_gradient(p), rel=1e-12)
    assert gradient(p, n, "none", "none") == pytest.approx(true_gradient(p), rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_groups_own_mean_shortens_the_step_by_n_minus_1_over_n(p: float, n: int) -> None:
    assert gradient(p, n, "group", "none") == pytest.approx((n - 1) / n * true_gradient(p), rel=1e-12)


def test_dividing_by_the_std_is_no_mere_other_step_size() -> None:
    """Between prompts: hard and easy ones count more against those in the middle than their true gradients do."""
    ratio = {p: gradient(p, 8, "group", "group") / true_gradient(p) for p in (0.1, 0.5, 0.9)}
    assert ratio[0.1] == pytest.approx(ratio[0.9], rel=1e-9)
    assert ratio[0.1] > 1.2 * ratio[0.5]
