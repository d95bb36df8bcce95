"""The order of prompts: every index once per epoch, the same everywhere, resumable at any point."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.data import DataError, PromptOrder
from actors.data.order import epoch_order

sizes = st.integers(1, 40)
takes = st.lists(st.integers(0, 50), max_size=8)


@settings(deadline=None)
@given(sizes, st.integers(0, 2**32), st.booleans(), takes)
def test_each_epoch_has_every_index_once(n: int, seed: int, shuffle: bool, ks: list[int]) -> None:
    order = PromptOrder(n, seed, shuffle)
    taken = [pair for k in ks for pair in order.take(k)]
    assert len(taken) == sum(ks)
    assert [epoch for epoch, _ in taken] == [i // n for i in range(len(taken))]
    for epoch in range(len(taken) // n):
        indices = [i for e, i in taken if e == epoch]
        assert sorted(indices) == list(range(n))
        assert indices == (epoch_order(n, seed, epoch).tolist() if shuffle else list(range(n)))


@settings(deadline=None)
@given(sizes, st.integers(0, 99), st.booleans(), takes, takes)
def test_resumes_exactly(n: int, seed: int, shuffle: bool, before: list[int], after: list[int]) -> None:
    order, other = PromptOrder(n, seed, shuffle), PromptOrder(n, seed, shuffle)
    for k in before:
        order.take(k)
    other.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert [order.take(k) for k in after] == [other.take(k) for k in after]


@settings(deadline=None)
@given(sizes, st.integers(0, 99), takes)
def test_batch_sizes_do_not_matter(n: int, seed: int, ks: list[int]) -> None:
    order = PromptOrder(n, seed, True)
    assert [pair for k in ks for pair in order.take(k)] == PromptOrder(n, seed, True).take(sum(ks))


def test_known_orders() -> None:
    # Golden: must never change, or runs could not be repeated on another machine or version.
    assert epoch_order(8, 0, 0).tolist() == [3, 4, 0, 6, 5, 7, 2, 1]
    assert epoch_order(8, 0, 1).tolist() == [1, 0, 5, 6, 7, 2, 4, 3]
    assert epoch_order(8, 1, 0).tolist() == [6, 5, 2, 1, 3, 7, 4, 0]


def test_positions_are_uniform() -> None:
    # Where index 0 lands over 6,000 epochs of 6: chi-square with 5 degrees of freedom, 99.99 % at 25.7.
    counts = np.bincount([int(np.flatnonzero(epoch_order(6, 7, e) == 0)[0]) for e in range(6000)], minlength=6)
    assert ((counts - 1000) ** 2 / 1000).sum() < 25.7


@pytest.mark.parametrize(
    ("n", "seed", "shuffle", "key"),
    [(9, 1, True, "data.train"), (8, 2, True, "run.seed"), (8, 1, False, "data.shuffle")],
)
def test_a_state_of_another_run_is_refused(n: int, seed: int, shuffle: bool, key: str) -> None:
    state = PromptOrder(8, 1, True).state_dict()
    with pytest.raises(DataError, match=key):
        PromptOrder(n, seed, shuffle).load_state_dict(state)


def test_bad_input() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptOrder(0, 1, True).take(1)
    with pytest.raises(ValueError, match="-1"):
        PromptOrder(1, 1, True).take(-1)
    with pytest.raises(DataError, match="damaged"):
        PromptOrder(3, 1, True).load_state_dict({**PromptOrder(3, 1, True).state_dict(), "position": 4})
