"""The accept rule: a drafted token is accepted if and only if it equals the target's own draw. Pure array functions.

With drafts of length 0 this is plain decoding: one draw per request, always emitted. Because every emitted token is the
target's own draw at its position, tokens are the same with and without speculation, whatever was drafted.
"""

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def accept(
    draws: Int64Array, drafts: Int64Array, stop: Int64Array, remaining: Int64Array
) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Count the accepted draws of each request, for chains.

    draws [R, K+1]: the target's draw after each drafted prefix (column 0: after no draft). drafts [R, K], padded with
    -1 (which no draw equals). stop [R, n_stop] padded with -1. remaining [R] >= 1: tokens until the request's limit.
    Returns (emitted [R] in 1..K+1, accepted drafts [R], stopped [R]: the last emitted draw is a stop token).
    """
    if draws.shape[1] == 1:
        ones = np.ones(len(draws), np.int64)
        return ones, np.zeros_like(ones), (draws == stop).any(axis=1)
    agree = np.logical_and.accumulate(draws[:, :-1] == drafts, axis=1)
    return _emit(draws, agree.sum(axis=1), stop, remaining)


def walk(draws: Int64Array, tokens: Int64Array, parents: Int64Array) -> tuple[Int64Array, Int64Array]:
    """From the last known token, take the target's draw while it is among the children drafted there.

    draws [R, K+1]: the target's draw at the last known token (column 0) and at every node (column i + 1).
    tokens [R, K], padded with -1; parents [R, K]. Returns (path [R, K+1]: the columns of `draws` along the way, then
    0; agreed [R]: how many nodes it took).
    """
    requests, width = tokens.shape
    rows = np.arange(requests)
    path = np.zeros((requests, width + 1), np.int64)
    agreed = np.zeros(requests, np.int64)
    column, going = np.zeros(requests, np.int64), np.ones(requests, np.bool_)
    for step in range(1, width + 1):
        child = (parents == column[:, None] - 1) & (tokens == draws[rows, column][:, None])
        going &= child.any(axis=1)
        if not going.any():
            break
        column = np.where(going, child.argmax(axis=1) + 1, column)
        path[:, step] = np.where(going, column, 0)
        agreed += going
    return path, agreed


def accept_tree(
    draws: Int64Array, tokens: Int64Array, parents: Int64Array, stop: Int64Array, remaining: Int64Array
) -> tuple[Int64Array, Int64Array, BoolArray, Int64Array]:
    """Same as `accept`, for trees. Also returns the path [R, K+1] of `walk`: emitted token j of request r is draws[r,
    path[r, j]]."""
    path, agreed = walk(draws, tokens, parents)
    emitted, accepted, stopped = _emit(np.take_along_axis(draws, path, axis=1), agreed, stop, remaining)
    return emitted, accepted, stopped, path


def _emit(
    sequence: Int64Array, agreed: Int64Array, stop: Int64Array, remaining: Int64Array
) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Return the agreed drafts plus one draw, cut at the limit and behind the first stop token."""
    emitted = np.minimum(agreed + 1, remaining)
    is_stop = (sequence[:, :, None] == stop[:, None, :]).any(axis=2)
    first_stop = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1), sequence.shape[1])
    stopped = first_stop < emitted
    emitted = np.where(stopped, first_stop + 1, emitted)
    return emitted, np.minimum(agreed, emitted), stopped
