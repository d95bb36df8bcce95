"""Trees in tensors against trees in arrays, node for node."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.eagle.tree import Nodes, best_nodes, best_of_level, grown_mask
from drafter.eagle.tree_tensors import Fed, Level, best_of, children, grown


def some_scores(rng: np.random.Generator, shape: tuple[int, ...], coarse: bool) -> np.ndarray:
    """Descending along the last axis, as draws are; coarse ones have ties, and -inf where truncation left nothing."""
    scores = -rng.exponential(1.0, shape)
    if coarse:
        scores = np.round(scores * 2) / 2
        scores[rng.random(shape) < 0.2] = -np.inf
    return -np.sort(-scores.astype(np.float32), axis=-1)


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
    """Frontiers, masks, fed tokens and features of every level, and the best nodes; ties go to the same node."""
    rng, width = np.random.default_rng(seed), 3
    tokens = rng.integers(0, 1000, (requests, k))
    scores = some_scores(rng, (requests, k), coarse)
    hidden = rng.normal(size=(requests, 1, width)).astype(np.float32)
    nodes, first, outputs = Nodes(tokens, np.full_like(tokens, -1), scores), 0, hidden
    mask, fed_tokens, fed_hidden = (
        np.zeros((requests, 0, 0), np.bool_),
        np.zeros((requests, 0), np.int64),
        hidden[:, :0],
    )
    found = [Level(torch.from_numpy(tokens), torch.full((requests, k), -1), torch.from_numpy(scores))]
    fed: Fed | None = None
    every = np.arange(requests)[:, None]
    for _ in range(1, levels):
        frontier = best_of_level(nodes, first, k, mask.shape[1])
        mask = grown_mask(mask, frontier.parent_rows)
        fed_tokens = np.concatenate((fed_tokens, nodes.tokens[every, frontier.nodes]), axis=1)
        fed_hidden = np.concatenate((fed_hidden, outputs[every, np.maximum(frontier.parent_rows, 0)]), axis=1)
        fed = grown(found[-1], first, k, fed, torch.from_numpy(outputs))
        np.testing.assert_array_equal(fed.newest.numpy(), frontier.nodes)
        np.testing.assert_array_equal(fed.mask.numpy(), mask.astype(np.uint8))
        np.testing.assert_array_equal(fed.tokens.numpy(), fed_tokens)
        np.testing.assert_array_equal(fed.hidden.numpy(), fed_hidden)
        outputs = rng.normal(size=(requests, mask.shape[1], width)).astype(np.float32)
        tokens = rng.integers(0, 1000, (requests * k, k))
        drawn = some_scores(rng, (requests * k, k), coarse)
        first = nodes.tokens.shape[1]
        paths = drawn.reshape(requests, k, k) + nodes.scores[every, frontier.nodes][:, :, None]
        nodes = nodes.extended(
            tokens.reshape(requests, k * k), np.repeat(frontier.nodes, k, axis=1), paths.reshape(requests, k * k)
        )
        found.append(children(torch.from_numpy(tokens), torch.from_numpy(drawn), fed))
    count = min(verified, nodes.tokens.shape[1])
    expected_tokens, expected_parents, known = best_nodes(nodes, count)
    best_tokens, parents, best_scores = best_of(found, count)
    np.testing.assert_array_equal(np.isfinite(best_scores.numpy()).sum(axis=1), known)
    np.testing.assert_array_equal(best_tokens.numpy(), expected_tokens)
    np.testing.assert_array_equal(parents.numpy(), expected_parents)
