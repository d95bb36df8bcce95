"""The call that the model-free drafters' native indexes have in common. Owns its arrays; never reads them."""

from typing import Any

import numpy as np

from config.strategy import Strategy
from drafter.protocol import BatchView, Drafts


def propose(
    index: Any, history_shape: tuple[int, int], batch: BatchView, strategy: Strategy, *settings: float
) -> Drafts:
    """Draft chains of at most strategy.depth tokens, or trees of at most strategy.tokens_to_verify nodes. `settings`:
    further arguments of this index.

    Raises ValueError if the batch names a slot without a request, or its history is not of `history_shape`."""
    if batch.history.shape != history_shape:
        raise ValueError(f"history is {batch.history.shape}, this drafter was made for {history_shape}")
    shape = (len(batch.slots), strategy.tokens_to_verify)
    tokens, parents = np.empty(shape, np.int64), np.empty(shape, np.int64)
    counts = np.empty(shape[0], np.int64)
    index.propose(
        batch.history,
        batch.slots,
        batch.lengths,
        batch.room,
        strategy.depth,
        strategy.top_k,
        *settings,
        tokens,
        parents,
        counts,
    )
    return Drafts(tokens, counts, parents if strategy.is_tree else None)
