"""A head whose drafts are never accepted, or half as often as at first, is told of once; chance is not."""

import numpy as np
import pytest

from policies.drafter.silence import MIN_DRAFTED, RECENT_STEPS, REFERENCE_DRAFTED, SilenceWatch


def steps(watch: SilenceWatch, rate: float, count: int, rng: np.random.Generator, drafts: int = 64) -> list[str]:
    """Chains of four, each token standing with probability `rate` if all before it do."""
    told: list[str] = []
    for _ in range(count):
        stood = (rng.random((drafts, 4)) < rate).cumprod(axis=1).sum()
        told += [one.kind for one in watch.step([("eagle:4", 4 * drafts, int(stood)), ("suffix:8", 800, 0)])]
    return told


def test_a_head_that_is_never_right_is_told_of_once() -> None:
    watch = SilenceWatch(["eagle"])
    rng = np.random.default_rng(0)
    assert steps(watch, 0.0, 1, rng, drafts=MIN_DRAFTED // 4 - 1) == []
    assert steps(watch, 0.0, 5, rng) == ["silent"]
    assert SilenceWatch(["eagle"]).step([("suffix:8", 10_000, 0)]) == []


def test_a_head_that_falls_by_more_than_half_is_told_of() -> None:
    watch = SilenceWatch(["eagle"])
    rng = np.random.default_rng(1)
    assert steps(watch, 0.7, 20, rng) == []
    assert steps(watch, 0.2, 30, rng) == ["fallen"]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_one_that_stays_is_not(seed: int, rate: float) -> None:
    assert steps(SilenceWatch(["eagle"]), rate, 300, np.random.default_rng(seed), drafts=64) == []


def test_a_trained_one_is_the_canarys() -> None:
    watch = SilenceWatch(["eagle"], trained=["eagle"])
    rng = np.random.default_rng(2)
    assert steps(watch, 0.7, 20, rng) + steps(watch, 0.1, 50, rng) == []
    never = SilenceWatch(["eagle"], trained=["eagle"])
    assert steps(never, 0.0, 15, rng) == []
    assert steps(never, 0.0, 2, rng) == ["silent"]


def test_only_equal_strategies_are_compared() -> None:
    """A deeper chain is accepted less by the same head."""
    watch = SilenceWatch(["eagle"])
    for _ in range(1 + REFERENCE_DRAFTED // 200):
        assert watch.step([("eagle:2", 200, 160)]) == []
    for _ in range(3 * RECENT_STEPS):
        assert watch.step([("eagle:8", 800, 240)]) == []
    told = [one for _ in range(RECENT_STEPS) for one in watch.step([("eagle:2", 200, 30)])]
    assert [(one.drafter, one.kind) for one in told] == [("eagle", "fallen")]
    assert told[0].share == pytest.approx(30 / 160, abs=0.02)
