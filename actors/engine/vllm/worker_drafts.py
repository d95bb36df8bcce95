"""What a network of vLLM's drafted at the end of the step before, as one of our drafters. Owns it for one step."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drafter.protocol import BatchView, Drafts
from policies.speculation.strategy import Strategy


class WorkerDrafter:
    """Drafter `name`, whose tokens come from where the model is executed; weights and K/V are there."""

    needs_hidden = False

    def __init__(self, name: str, when_idle: int) -> None:
        """`when_idle`: what vLLM is told to draft while other strategies run (`actors.engine.vllm.drafter_passes`)."""
        self.name, self.when_idle = name, when_idle
        self._chains: Sequence[Sequence[int]] = ()

    def made(self, chains: Sequence[Sequence[int]]) -> None:
        """Before `propose`: for each of the requests that decode, in their order."""
        self._chains = chains

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        counts = np.array([min(len(chain), strategy.depth) for chain in self._chains], np.int64)
        tokens = np.full((len(counts), max(1, int(counts.max(initial=0)))), -1, np.int64)
        for row, chain, count in zip(tokens, self._chains, counts, strict=True):
            row[:count] = chain[:count]
        return Drafts(tokens, counts)

    def begin(self, slot: int, prompt_tokens: NDArray[np.int32], response_tokens: NDArray[np.int32]) -> None: ...
    def end(self, slot: int, tokens: NDArray[np.int32], prompt_length: int, finished: bool) -> None: ...
    def new_target(self, version: int) -> None: ...
    def remember(self, prompts: list[NDArray[np.int32]], responses: list[NDArray[np.int32]]) -> None: ...
    def save(self, directory: str) -> None: ...
    def load(self, directory: str) -> None: ...
