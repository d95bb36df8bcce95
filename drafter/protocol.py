"""The seam between an engine and what drafts for it. Owns the shapes that cross it; never drafts, never verifies.

The engine checks everything a drafter returns: a draft can only make a step slower, never change a token.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchView:
    """The R requests that decode in this engine step, as read-only arrays. Valid only inside `propose`."""

    request_ids: Int64Array  # [R]
    prompt_ids: Int64Array  # [R]
    slots: Int64Array  # [R], rows of `history`
    history: NDArray[np.int32]  # [slots, max_tokens]; prompt and response of request r: history[slots[r], :lengths[r]]
    lengths: Int64Array  # [R], tokens known (prompt and response)
    prompt_lengths: Int64Array  # [R]
    noise_keys: Int64Array  # [R]; the token after `lengths[r]` is drawn with noise position lengths - prompt_lengths
    temperatures: NDArray[np.float32]  # [R]
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposed continuations: request r continues with tokens[r, :counts[r]]."""

    tokens: Int64Array  # [R, K]
    counts: Int64Array  # [R], 0 <= counts <= K; 0 is 'nothing to propose'


class Drafter(Protocol):
    """Proposes tokens that may follow each request's history."""

    def propose(self, batch: BatchView, depth: int) -> Drafts:
        """Up to `depth` >= 1 tokens for every request of the batch."""
