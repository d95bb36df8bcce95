"""Passing over prompts that are always or never solved: what settles one, and the coin."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.token_budget import SkipOptions
from models.noise import noise_key
from models.philox import KEEP, uniform
from policies.token_budget.skip import PromptSkip, coin

SURE = 1e-9  # of `keep`: the coin keeps practically none


def skipping(after: int | None, keep: float = SURE, seed: int = 0) -> PromptSkip:
    return PromptSkip(SkipOptions(after=after, keep=keep), seed)


@pytest.mark.parametrize("reward", [0.0, 1.0, -0.5])
def test_a_prompt_is_passed_over_once_its_last_groups_had_one_and_the_same_reward(reward: float) -> None:
    skip = skipping(after=2)
    passed = []
    for epoch in range(4):
        passed.append(skip.passes_over(epoch, 7))
        skip.observe(7, [reward] * 8)
    assert passed == [False, False, True, True]
    assert not skip.passes_over(4, 8), "another prompt"


@pytest.mark.parametrize(
    ("groups", "settled"),
    [
        ([[1, 1], [1, 1]], True),
        ([[1, 1], [1, 0], [1, 1]], False),  # two different rewards
        ([[0, 0], [1, 1]], False),  # it was never solved, and now it always is: something moves
        ([[0, 0], [1, 1], [1, 1]], True),
        ([[1, 1], [1]], False),  # one grade tells no spread
        ([[1, 1], [], [1, 1]], True),
        ([[0.1 + 0.2, 0.3], [0.3, 0.3]], True),  # equal up to rounding
    ],
)
def test_what_settles_a_prompt(groups: list[list[float]], settled: bool) -> None:
    skip = skipping(after=2)
    for rewards in groups:
        skip.observe(0, rewards)
    assert skip.passes_over(9, 0) is settled


def test_nothing_is_passed_over_where_it_is_off_or_everything_is_kept() -> None:
    off, kept = skipping(after=None), skipping(after=1, keep=1.0)
    for epoch in range(200):
        for skip in (off, kept):
            skip.observe(0, [1, 1])
            assert not skip.passes_over(epoch, 0)


@pytest.mark.parametrize("keep", [0.1, 0.5])
def test_a_settled_prompt_is_kept_with_probability_keep(keep: float) -> None:
    skip = skipping(after=1, keep=keep, seed=3)
    skip.observe(0, [0, 0])
    kept = 1 - np.mean([skip.passes_over(epoch, 0) for epoch in range(4000)])
    assert kept == pytest.approx(keep, abs=4 * np.sqrt(keep * (1 - keep) / 4000))


@pytest.mark.parametrize(("after", "zero"), [(1, 0.43), (2, 0.66)])
def test_a_prompt_counts_as_much_less_as_the_manual_says(after: int, zero: float) -> None:
    """docs/concepts/token_budget.md: of its turns a prompt whose groups have no spread with probability q takes
    1 / (1 + q^after (1 / keep - 1))."""
    keep, turns = 0.25, 20_000
    skip, rng, sampled = skipping(after, keep), np.random.default_rng(0), 0
    for epoch in range(turns):
        if not skip.passes_over(epoch, 0):
            sampled += 1
            skip.observe(0, [1, 1] if rng.random() < zero else [1, 0])
    assert sampled / turns == pytest.approx(1 / (1 + zero**after * (1 / keep - 1)), abs=0.02)


def test_the_coin_is_a_stream_of_its_own() -> None:
    """Uniform, and uncorrelated between epochs, prompts and seeds, and with the coin of late responses."""
    draws = np.array([[coin(seed, epoch, prompt) for epoch in range(1000)] for seed in (0, 1) for prompt in (0, 1)])
    assert np.abs(np.quantile(draws, [0.25, 0.5, 0.75]) - [0.25, 0.5, 0.75]).max() < 0.03
    late = [uniform(noise_key(0, epoch, 0, 0), KEEP) for epoch in range(1000)]
    shifted = [*draws[0, 1:].tolist(), 0.5]
    correlations = np.corrcoef(np.vstack((draws, late, shifted)))
    assert np.abs(correlations - np.eye(len(correlations))).max() < 5 / np.sqrt(1000)


rewards = st.lists(st.sampled_from([0.0, 1.0, 0.5]), max_size=3)
visits = st.lists(st.tuples(st.integers(0, 3), rewards), max_size=30)


@given(before=visits, later=visits, after=st.integers(1, 3))
def test_who_resumes_decides_as_the_interrupted_one_would_have(
    before: list[tuple[int, list[float]]], later: list[tuple[int, list[float]]], after: int
) -> None:
    one, other = skipping(after, keep=0.5), skipping(after, keep=0.5)
    for prompt, group in before:
        one.observe(prompt, group)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for epoch, (prompt, group) in enumerate(later):
        assert one.passes_over(epoch, prompt) == other.passes_over(epoch, prompt)
        one.observe(prompt, group)
        other.observe(prompt, group)
    assert one.state_dict() == other.state_dict()
