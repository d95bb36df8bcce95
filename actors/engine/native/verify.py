"""The accept rule: a drafted token stands exactly when it equals the target model's own draw. Pure array functions.

With drafts of length 0 this is plain decoding: one draw per request, always emitted. Because every emitted token is the
target's own draw at its position, tokens are the same with and without speculation, whatever was drafted.
"""

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def clean_drafts(tokens: object, counts: object, requests: int, depth: int, vocab_size: int) -> Int64Array | None:
    """Untrusted drafts as [requests, depth] int64, each cut at its first unusable token and padded with -1.

    None if nothing usable is left or the arrays make no sense (wrong rank, wrong number of requests, not integers).
    """
    drafted, lengths = np.asarray(tokens), np.asarray(counts)
    if drafted.ndim != 2 or len(drafted) != requests or lengths.shape != (requests,):
        return None
    if drafted.dtype.kind not in "iu" or lengths.dtype.kind not in "iu":
        return None
    drafted = drafted[:, :depth].astype(np.int64)
    usable = (np.arange(drafted.shape[1]) < lengths[:, None]) & (drafted >= 0) & (drafted < vocab_size)
    usable = np.logical_and.accumulate(usable, axis=1)
    return np.where(usable, drafted, -1) if usable.any() else None


def accept(
    draws: Int64Array, drafts: Int64Array, stop: Int64Array, remaining: Int64Array
) -> tuple[Int64Array, Int64Array, BoolArray]:
    """How many draws of each request stand.

    draws [R, K+1]: the target's draw after each drafted prefix (column 0: after no draft). drafts [R, K], padded with
    -1 (which no draw equals). stop [R, n_stop] padded with -1. remaining [R] >= 1: tokens until the request's limit.
    Returns (emitted [R] in 1..K+1, accepted drafts [R], stopped [R]: the last emitted draw is a stop token).
    """
    if draws.shape[1] == 1:
        ones = np.ones(len(draws), np.int64)
        return ones, np.zeros_like(ones), (draws == stop).any(axis=1)
    agree = np.logical_and.accumulate(draws[:, :-1] == drafts, axis=1)
    emitted = np.minimum(agree.sum(axis=1) + 1, remaining)
    is_stop = (draws[:, :, None] == stop[:, None, :]).any(axis=2)
    first_stop = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1), draws.shape[1])
    stopped = first_stop < emitted
    emitted = np.where(stopped, first_stop + 1, emitted)
    accepted = np.minimum(agree.sum(axis=1), emitted)
    return emitted, accepted, stopped
