"""Group-relative advantages against numbers worked out by hand, and their invariances."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.advantages import EPSILON, group_advantages


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


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0], [0.1 + 0.2, 0.3], [1e6, 1e6 + 1e-5]])
def test_equal_rewards_are_reported_and_teach_nothing(rewards: list[float]) -> None:
    got = group_advantages(rewards, normalize_std=True)
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
