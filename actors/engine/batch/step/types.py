"""The array work of a step, between scheduler, drafter, model and table. Owns its shapes; decides nothing.

Two implementations give equal arrays: `reference` says what is meant, `kernels` does it in a few microseconds.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from contracts.rollout import FinishReason

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDrafts:
    """Drafts of one step that are safe to verify, already behind the last known tokens in the token table: tokens in
    range, every node's parent before it, siblings different. R requests of the plan, of which S sample."""

    counts: Int64Array  # [R]
    tokens: Int64Array  # [S, K], -1 behind the counts
    parents: Int64Array | None = None  # [S, K], -1: the last known token; None: chains. Trees only where S = R.
    depths: Int64Array | None = (
        None  # [S, K], 1 for children of the last known token, 0 behind the counts; with parents
    )
    drafted: int = 0  # sum of counts
    distributions: Tensor | None = None  # [S, K, V], as in drafter.protocol.Drafts

    @property
    def reached(self) -> Int64Array:
        """How deep the draft of each request is, [R]; [S] for trees."""
        if self.depths is None:
            return self.counts
        deepest: Int64Array = self.depths.max(axis=1)
        return deepest

    def cut(self, counts: Int64Array) -> "StepDrafts":
        """The first counts[r] <= self.counts[r] nodes of each request; where every request of the plan samples."""
        kept = np.arange(self.tokens.shape[1]) < counts[:, None]
        tokens, drafted = np.where(kept, self.tokens, -1), int(counts.sum())
        if self.parents is None or self.depths is None:
            return StepDrafts(counts=counts, tokens=tokens, drafted=drafted)
        return StepDrafts(
            counts=counts,
            tokens=tokens,
            parents=np.where(kept, self.parents, -1),
            depths=self.depths * kept,
            drafted=drafted,
        )


@dataclass(frozen=True, slots=True)
class StepRows:
    """The T rows of a forward, N of which are drawn from; valid until the next step's."""

    # tokens, positions, kv_slots int64 [T]; query_offsets int32 [R + 1]; context_lens int32 [R]; block_tables int32
    # [R, M]; noise_keys, noise_positions int64, temperature float32 [N]; where they matter sample_rows (N < T), top_k,
    # top_p [N], and tree_mask uint8 [T, K + 1].
    arrays: dict[str, NDArray[np.generic]]
    most: int  # rows of one request
    max_context: int
    sampled: int  # N
    truncated: bool  # some row has top-k or top-p


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What the draws of a step did to the S requests that sampled."""

    new_tokens: int
    ended: list[tuple[int, FinishReason]]  # slots, and by what
    due: list[int]  # slots with enough new tokens to report, not ended
    emitted: Int64Array | None = None  # [S]; None: one each
    accepted: Int64Array | None = None  # [S] drafts that stood; None: there were none
    accepted_tokens: int = 0
    path: Int64Array | None = None  # trees: [S, K + 1] rows of each request along its way, 0 the last known token
    moves: Int64Array | None = None  # trees: [2, N] K/V slots (from, to) that bring accepted nodes into place


def as_drafts(tokens: object, counts: object, requests: int) -> tuple[Int64Array, Int64Array] | None:
    """Arrays of a drafter as int64 [R, K] and [R]; None if they make no sense."""
    drafted, lengths = np.asarray(tokens), np.asarray(counts)
    if drafted.ndim != 2 or len(drafted) != requests or lengths.shape != (requests,):
        return None
    if drafted.dtype.kind not in "iu" or lengths.dtype.kind not in "iu":
        return None
    return drafted.astype(np.int64, copy=False), lengths.astype(np.int64, copy=False)


def as_parents(parents: object, requests: int, width: int) -> Int64Array | None:
    """Parents of a drafter as int64 [R, >= width]; None if they make no sense."""
    before = np.asarray(parents)
    if before.ndim != 2 or before.shape[0] != requests or before.shape[1] < width or before.dtype.kind not in "iu":
        return None
    return before.astype(np.int64, copy=False)
