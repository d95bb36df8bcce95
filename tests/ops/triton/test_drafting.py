"""Joined inputs and growing trees in Triton's interpreter, against the oracle and the trees in arrays."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.ops import drafting
from models.ops.triton import launch_drafting
from tests.drafter.test_tree_operators import assert_grows_as_in_the_arrays
from tests.ops.triton.test_tokenwise import DTYPES, assert_close, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_inputs_are_joined_and_normed(norm: bool, dtype: torch.dtype) -> None:
    """Features may be columns of wider rows; a row does not depend on the others."""
    tokens, embedding = torch.tensor([3, 39, 0, 3, 7]), random(40, 48, dtype=dtype)
    features = random(5, 144, dtype=dtype, seed=1)[:, 96:]
    one, two = (random(48, dtype=dtype, seed=seed) if norm else None for seed in (2, 3))
    found = launch_drafting.draft_inputs(tokens, embedding, features, one, two, 1e-6)
    assert_close(found, drafting.draft_inputs(tokens, embedding, features, one, two, 1e-6))
    alone = launch_drafting.draft_inputs(tokens[2:3], embedding, features[2:3], one, two, 1e-6)
    assert torch.equal(found[2:3], alone)


@settings(deadline=None, max_examples=12)
@given(
    requests=st.integers(1, 3),
    levels=st.integers(1, 4),
    k=st.integers(2, 5),
    verified=st.integers(1, 40),
    coarse=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_tree_grows_as_in_the_arrays(
    requests: int, levels: int, k: int, verified: int, coarse: bool, seed: int
) -> None:
    """Ties go to the same node; widths that are no power of two."""
    feed, best = launch_drafting.tree_feed, launch_drafting.tree_best
    assert_grows_as_in_the_arrays(feed, best, requests, levels, k, verified, coarse, seed, width=5)


def test_a_tree_of_more_nodes_than_a_program_ranks() -> None:
    feed, best = launch_drafting.tree_feed, launch_drafting.tree_best
    assert_grows_as_in_the_arrays(feed, best, 2, 4, 8, 150, coarse=True, seed=7)


def test_draws_that_are_no_numbers_stay_inside_the_tree() -> None:
    """A drafter gone astray must not make a kernel write where it may not."""
    requests, k = 2, 3
    drawn, logprobs = torch.arange(18).view(6, 3), torch.full((6, 3), torch.nan)
    newest, paths = torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.zeros(2, 3)
    nodes = torch.zeros(2, 12, dtype=torch.int64), torch.full((2, 12), -1), torch.zeros(2, 12)
    fed = torch.zeros(2, 3, dtype=torch.int64), torch.randn(2, 3, 4), torch.eye(3, dtype=torch.uint8).repeat(2, 1, 1)
    tokens, hidden, _, chosen, _ = launch_drafting.tree_feed(
        drawn, logprobs, newest, paths, 3, k, torch.randn(2, 3, 4), *fed, *nodes
    )
    assert tokens.shape == (requests, 6)
    assert hidden.isfinite().all()
    assert ((chosen >= 3) & (chosen < 12)).all()
