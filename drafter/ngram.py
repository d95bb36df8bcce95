"""The model-free drafter of TLT 5.3: drafts what followed the last few tokens before, in responses to the same prompt.

Owns a retrieval database per prompt (native/ngram.h) over the prompt, its running responses so far, and those that have
ended. Never looks across prompts. Keeps nothing over a restart: a group's texts are added again as its requests run.

The longest match of max_n .. min_n last tokens wins. At equal length the order is the request's own response, its
siblings', the prompt; within each, the most recent occurrence. A match of a single token is followed for two tokens
only. A strategy with top_k > 1 merges the continuations of all matches, in that order, into a tree with at most top_k
children per node.
"""

import numpy as np
from numpy.typing import NDArray

from config.speculation import SpeculationOptions
from config.strategy import Strategy
from drafter.native_index import propose
from drafter.protocol import BatchView, Drafter, Drafts
from models.ops.native import kernels


class NgramDrafter(Drafter):
    """Drafts from n-gram matches. Costs a few microseconds per step and about 1 us per request (one native call).

    slots, max_tokens: the shape of the engine's history. max_bytes bounds the database (about 150 bytes per token of
    response). Prompts that are not being sampled are dropped first, least recently used; above the limit new text is
    not entered. They are also dropped when `kept_versions` target versions passed without a request. The last
    `kept_texts` (up to twice as many) ended responses of each prompt count.

    Raises RuntimeError without the native extension, ValueError for n outside 1 <= min_n <= max_n <= 16.
    """

    name = "ngram"

    def __init__(
        self,
        slots: int,
        max_tokens: int,
        *,
        max_n: int = 4,
        min_n: int = 1,
        max_bytes: int = 256 << 20,
        kept_texts: int = 32,
        kept_versions: int = 8,
    ) -> None:
        if kernels is None:
            raise RuntimeError("the n-gram drafter needs the native extension: `pip install -e .` builds it")
        self._history_shape = (slots, max_tokens)
        self._index = kernels.Ngrams(slots, max_n, min_n, max_bytes, kept_texts, kept_versions)

    @property
    def bytes(self) -> int:
        """Memory of the database."""
        return int(self._index.bytes)

    @property
    def groups(self) -> int:
        """Number of prompts in the database."""
        return int(self._index.groups)

    def begin(self, slot: int, prompt_tokens: NDArray[np.int32], response_tokens: NDArray[np.int32]) -> None:
        self._index.begin(slot, prompt_tokens, response_tokens)

    def end(self, slot: int, tokens: NDArray[np.int32], prompt_length: int, finished: bool) -> None:
        self._index.end(slot, tokens, finished)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        """See `native_index.propose`."""
        return propose(self._index, self._history_shape, batch, strategy)

    def new_target(self, version: int) -> None:
        self._index.age()

    def remember(self, prompts: list[NDArray[np.int32]], responses: list[NDArray[np.int32]]) -> None:
        """Add rollouts that other workers finished, of prompts that are sampled here too."""
        for prompt, response in zip(prompts, responses, strict=True):
            self._index.remember(prompt, response)


def build(options: SpeculationOptions, slots: int, max_tokens: int) -> NgramDrafter:
    """See `drafter.build.build_retrieval`."""
    return NgramDrafter(slots, max_tokens)
