"""Trees of candidates as arrays over R requests: growth by best-first levels, and selection of the best nodes.

Scores are log-probabilities of whole paths. So a node never beats its parent, and the best nodes form a tree (TLT 5.1,
Figure 9; EAGLE-2). Pure array functions.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TreeNodes:
    """N candidates per request, every node after its parent."""

    tokens: Int64Array  # [R, N]
    parents: Int64Array  # [R, N], -1: the root
    scores: Float32Array  # [R, N], log-probability of the path; -inf: not a candidate

    def extended(self, tokens: Int64Array, parents: Int64Array, scores: Float32Array) -> "TreeNodes":
        return TreeNodes(
            np.concatenate((self.tokens, tokens), axis=1),
            np.concatenate((self.parents, parents), axis=1),
            np.concatenate((self.scores, scores), axis=1),
        )


def best_of_level(nodes: TreeNodes, first: int, k: int, fed_rows: int) -> tuple[Int64Array, Int64Array]:
    """Return the k best nodes from index `first` on, the children (k each) of the last k rows fed, to expand next.

    Returns their indices [R, k] and the rows [R, k] of their parents among those fed before; -1: none."""
    count = min(k, nodes.scores.shape[1] - first)
    order = np.argsort(-nodes.scores[:, first:], axis=1, kind="stable")[:, :count]
    return (order + first, fed_rows - k + order // k if fed_rows else np.full_like(order, -1))


def best_nodes(nodes: TreeNodes, count: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the best `count` nodes of each request, most probable first: tokens, parents [R, count] and their number
    [R]."""
    requests, total = nodes.scores.shape
    order = np.argsort(-nodes.scores, axis=1, kind="stable")[:, :count]
    rows = np.arange(requests)[:, None]
    place = np.full((requests, total + 1), -1, np.int64)  # the last column is for the root
    place[rows, order] = np.arange(order.shape[1])
    parents = place[rows, nodes.parents[rows, order]]
    return nodes.tokens[rows, order], parents, np.isfinite(nodes.scores[rows, order]).sum(axis=1)


def grown_mask(mask: NDArray[np.bool_], parent_rows: Int64Array) -> NDArray[np.bool_]:
    """Extend the attention mask, [R, F, F] -> [R, F + k, F + k], by k rows whose parents are parent_rows [R, k]."""
    requests, fed, _ = mask.shape
    count = parent_rows.shape[1]
    grown = np.zeros((requests, fed + count, fed + count), np.bool_)
    grown[:, :fed, :fed] = mask
    every = np.arange(requests)
    for i in range(count):
        row = fed + i
        inherited = grown[every, parent_rows[:, i]]
        grown[:, row] = np.where(parent_rows[:, i : i + 1] >= 0, inherited, False)
        grown[:, row, row] = True
    return grown
