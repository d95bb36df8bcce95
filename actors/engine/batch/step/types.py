"""Types of a step's array work, between scheduler, drafter, model and table.

Two implementations give equal arrays: `reference` is the oracle, `kernels` takes a few microseconds.
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
    """Drafts of one step that are safe to verify, already behind the last known tokens in the token table.

    Tokens are in range, every parent precedes its node, siblings differ. R requests of the plan, of which S sample."""

    counts: Int64Array  # [R]
    tokens: Int64Array  # [S, K], -1 behind the counts
    parents: Int64Array | None = None  # [S, K], -1: the last known token; None: chains. Trees only if S = R
    depths: Int64Array | None = (
        None  # [S, K], 1 for children of the last known token, 0 behind the counts; with parents
    )
    drafted: int = 0  # sum of counts
    distributions: Tensor | None = None  # [S, K, V], as in drafter.protocol.Drafts

    @property
    def reached(self) -> Int64Array:
        """Depth of each request's draft, [R]; [S] for trees."""
        if self.depths is None:
            return self.counts
        deepest: Int64Array = self.depths.max(axis=1)
        return deepest

    def cut(self, counts: Int64Array) -> "StepDrafts":
        """Return the first counts[r] <= self.counts[r] nodes of each request. All requests of the plan must sample."""
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
    """The T rows of a forward, N of which are drawn from; valid until the next step."""

    # tokens, positions, kv_slots int64 [T]; query_offsets int32 [R + 1]; context_lens int32 [R]; block_tables int32 [R,
    # M]; noise_keys, noise_positions int64, temperature float32 [N]; if needed sample_rows (N < T), top_k, top_p [N],
    # and tree_mask uint8 [T, K + 1].
    arrays: dict[str, NDArray[np.generic]]
    most: int  # rows of one request
    max_context: int
    sampled: int  # N
    truncated: bool  # some row has top-k or top-p


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Effect of a step's draws on the S requests that sampled."""

    new_tokens: int
    ended: list[tuple[int, FinishReason]]  # slots and reasons
    due: list[int]  # slots with enough new tokens to report, not ended
    emitted: Int64Array | None = None  # [S]; None: one each
    accepted: Int64Array | None = None  # [S] accepted drafts; None: no drafts
    accepted_tokens: int = 0
    path: Int64Array | None = None  # trees: [S, K + 1] accepted rows of each request in order, 0 the last known token
    moves: Int64Array | None = None  # trees: [2, N] K/V slots (from, to) that move accepted nodes into place


def as_drafts(tokens: object, counts: object, requests: int) -> tuple[Int64Array, Int64Array] | None:
    """Return a drafter's arrays as int64 [R, K] and [R]; None if malformed."""
    drafted, lengths = np.asarray(tokens), np.asarray(counts)
    if drafted.ndim != 2 or len(drafted) != requests or lengths.shape != (requests,):
        return None
    if drafted.dtype.kind not in "iu" or lengths.dtype.kind not in "iu":
        return None
    return drafted.astype(np.int64, copy=False), lengths.astype(np.int64, copy=False)


def as_parents(parents: object, requests: int, width: int) -> Int64Array | None:
    """Return a drafter's parents as int64 [R, >= width]; None if malformed."""
    before = np.asarray(parents)
    if before.ndim != 2 or before.shape[0] != requests or before.shape[1] < width or before.dtype.kind not in "iu":
        return None
    return before.astype(np.int64, copy=False)
