"""Advantages by a function of the user's own."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.import_path import OwnCodeError
from examples.own_parts.advantages import rare_successes
from policies.advantages import batch_advantages
from policies.own_advantages import own_advantages, try_advantages

MODULE = """
import numpy as np

def centred(rewards, lengths):
    return [group - group.mean() for group in rewards]

def by_length(rewards, lengths, per=1.0):
    return [group / (per * np.maximum(tokens, 1)) for group, tokens in zip(rewards, lengths)]

def one(rewards, lengths):
    return [0.0 for group in rewards]

def few(rewards, lengths):
    return [group for group in rewards][1:]

def endless(rewards, lengths):
    return [group / 0 for group in rewards]

def texts(rewards, lengths):
    return [["a"] * len(group) for group in rewards]

def flat(rewards, lengths):
    return np.concatenate(rewards)

def changes(rewards, lengths):
    for group in rewards:
        group[:] = 7.0
    return rewards

def broken(rewards, lengths):
    return rewards[99]
"""
GROUPS, LENGTHS = [[0.0, 1.0, 1.0, 0.0], [1.0, 1.0]], [[3, 5, 0, 4], [9, 9]]


@pytest.fixture(autouse=True, scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("advantages")
    (folder / "user_advantages.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def advantages(name: str, **arguments: object) -> list[list[float]]:
    made = own_advantages(GROUPS, LENGTHS, path=f"user_advantages:{name}", arguments=arguments)
    return [group.advantages.tolist() for group in made]


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=5))
def test_a_users_group_mean_is_the_built_in_one(groups: list[list[float]]) -> None:
    own = own_advantages(groups, [[1] * len(g) for g in groups], path="user_advantages:centred", arguments={})
    built_in = batch_advantages(groups, baseline="group", normalize="none")
    for mine, ours in zip(own, built_in, strict=True):
        assert np.allclose(mine.advantages, ours.advantages, atol=1e-8)
        assert (mine.mean, mine.std, mine.zero_variance) == (ours.mean, ours.std, ours.zero_variance)


def test_it_gets_rewards_lengths_and_arguments_and_its_copies_are_its_own() -> None:
    assert advantages("by_length", per=2.0) == [[0.0, 0.1, 0.5, 0.0], [1 / 18, 1 / 18]]
    assert advantages("changes") == [[7.0] * 4, [7.0] * 2]
    assert GROUPS == [[0.0, 1.0, 1.0, 0.0], [1.0, 1.0]]
    assert own_advantages([], [], path="user_advantages:centred", arguments={}) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one", r"returned shape \[\] for group 0 of \d responses, not \[\d\]"),
        ("few", r"returned \d entries, not a list with an array for each of \d groups"),
        ("endless", r"returned (nan|inf) for response \d of group 0"),
        ("texts", "returned no numbers for group 0"),
        ("flat", "returned ndarray, not a list"),
        ("broken", r"raised IndexError: .* \(.*user_advantages\.py:\d+\)"),
        ("absent", "has no 'absent'"),
    ],
)
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
def test_what_is_wrong_with_it_is_said(name: str, said: str) -> None:
    with pytest.raises(OwnCodeError, match=f"objective.advantages: .*{said}"):
        advantages(name)
    with pytest.raises(OwnCodeError, match=said):
        try_advantages(f"user_advantages:{name}", {})


def test_the_example_lets_rare_successes_count_more() -> None:
    rare, usual = rare_successes([np.array([1.0] + 7 * [0.0]), np.array([1.0, 0.0])], [])
    assert rare[0] == pytest.approx(7.0)
    assert usual.tolist() == pytest.approx([1.0, -1.0])
    assert rare_successes([np.zeros(3)], [])[0].tolist() == [0.0, 0.0, 0.0]
