"""An own drafter, to copy from: it drafts what followed the last token's last occurrence in the same text.

It runs in the engine's process between engine steps, so it must be fast. It cannot change a token: the target model
verifies every draft. A drafter that raises is switched off, with an event.
"""

import numpy as np

from paceline.extend import BatchView, Drafter, Drafts, Strategy


class Echo(Drafter):
    """Only `propose` is needed; begin, end, remember, ... do nothing unless they are written."""

    def __init__(self, slots: int, max_tokens: int, *, window: int = 256) -> None:
        """slots, max_tokens: the shape of BatchView.history. window: number of last tokens to search."""
        self._window = window

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        """Draft a chain of at most strategy.depth tokens for every request; a count of 0 drafts nothing."""
        tokens = np.zeros((len(batch.slots), strategy.depth), np.int64)
        counts = np.zeros(len(batch.slots), np.int64)
        for row, (slot, length) in enumerate(zip(batch.slots, batch.lengths, strict=True)):
            text = batch.history[slot, max(0, length - self._window) : length]
            earlier = np.flatnonzero(text[:-1] == text[-1])
            if len(earlier):
                found = text[earlier[-1] + 1 :][: strategy.depth]
                counts[row] = len(found)
                tokens[row, : len(found)] = found
        return Drafts(tokens, counts)
