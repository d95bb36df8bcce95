"""Trees in tensors against trees in arrays, node for node."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.eagle.tree import TreeNodes, best_nodes, best_of_level, grown_mask
from models.ops import drafting


def some_scores(rng: np.random.Generator, shape: tuple[int, ...], coarse: bool) -> np.ndarray:
    """Descending along the last axis, as draws are; coarse ones have ties, and -inf where truncation left nothing."""
    scores = -rng.exponential(1.0, shape)
    if coarse:
        scores = np.round(scores * 2) / 2
        scores[rng.random(shape) < 0.2] = -np.inf
    return -np.sort(-scores.astype(np.float32), axis=-1)


def assert_grows_as_in_the_arrays(
    feed: Any, best: Any, requests: int, levels: int, k: int, verified: int, coarse: bool, seed: int, width: int = 3
) -> None:
    """Frontiers, masks, fed tokens and features of every level, and the best nodes, of a random tree."""
    rng, every = np.random.default_rng(seed), np.arange(requests)[:, None]
    total = k + (levels - 1) * k * k
    drawn = rng.integers(0, 1000, (requests, k)), some_scores(rng, (requests, k), coarse)
    outputs = rng.normal(size=(requests, 1, width)).astype(np.float32)
    nodes, first = TreeNodes(drawn[0], np.full_like(drawn[0], -1), drawn[1]), 0
    mask, tokens, hidden = np.zeros((requests, 0, 0), np.bool_), np.zeros((requests, 0), np.int64), outputs[:, :0]
    fed = torch.from_numpy(tokens), torch.from_numpy(hidden), torch.zeros(requests, 0, 0, dtype=torch.uint8)
    noted = (
        torch.full((requests, total), 999),
        torch.full((requests, total), 999),
        torch.full((requests, total), torch.inf),
    )
    newest: torch.Tensor | None = None
    paths: torch.Tensor | None = None
    for _ in range(1, levels):
        chosen, parent_rows = best_of_level(nodes, first, k, mask.shape[1])
        mask = grown_mask(mask, parent_rows)
        tokens = np.concatenate((tokens, nodes.tokens[every, chosen]), axis=1)
        hidden = np.concatenate((hidden, outputs[every, np.maximum(parent_rows, 0)]), axis=1)
        level = map(torch.from_numpy, drawn)
        *fed, newest, paths = feed(*level, newest, paths, first, k, torch.from_numpy(outputs), *fed, *noted)
        np.testing.assert_array_equal(newest.numpy(), chosen)
        np.testing.assert_array_equal(paths.numpy(), nodes.scores[every, chosen])
        np.testing.assert_array_equal(fed[0].numpy(), tokens)
        np.testing.assert_array_equal(fed[1].numpy(), hidden)
        np.testing.assert_array_equal(fed[2].numpy(), mask.astype(np.uint8))
        outputs = rng.normal(size=(requests, mask.shape[1], width)).astype(np.float32)
        drawn = rng.integers(0, 1000, (requests * k, k)), some_scores(rng, (requests * k, k), coarse)
        first = nodes.tokens.shape[1]
        scores = drawn[1].reshape(requests, k, k) + nodes.scores[every, chosen][:, :, None]
        parents = np.repeat(chosen, k, axis=1)
        nodes = nodes.extended(drawn[0].reshape(requests, -1), parents, scores.reshape(requests, -1))
    count = min(verified, total)
    expected_tokens, expected_parents, known = best_nodes(nodes, count)
    found = (
        torch.full((requests, count), -7),
        torch.full((requests, count), -7),
        torch.full((requests, count), torch.nan),
    )
    best(*map(torch.from_numpy, drawn), newest, paths, first, *noted, *found)
    np.testing.assert_array_equal(np.isfinite(found[2].numpy()).sum(axis=1), known)
    np.testing.assert_array_equal(found[0].numpy(), expected_tokens)
    np.testing.assert_array_equal(found[1].numpy(), expected_parents)


@settings(deadline=None, max_examples=60)
@given(
    requests=st.integers(1, 4),
    levels=st.integers(1, 5),
    k=st.integers(2, 5),
    verified=st.integers(1, 80),
    coarse=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_tree_grows_as_in_the_arrays(
    requests: int, levels: int, k: int, verified: int, coarse: bool, seed: int
) -> None:
    """Ties go to the same node."""
    feed, best = drafting.tree_feed, drafting.tree_best
    assert_grows_as_in_the_arrays(feed, best, requests, levels, k, verified, coarse, seed)
