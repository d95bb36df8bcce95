"""Drafts of a vLLM network from the end of the previous step, behind our drafter interface. Holds them for one step."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from actors.engine.vllm.drafter_passes import NOT_AT_ALL
from config.strategy import Strategy
from drafter.protocol import BatchView, Drafter, Drafts

REST_AFTER_STEPS = 64
_SURE, _ASK_AGAIN_STEPS = 4, 16  # queries at first, then once in this many steps: each calls all ranks


class WorkerDrafter(Drafter):
    """Drafter `name`, whose tokens come from where the model is executed; weights and K/V are there."""

    def __init__(self, name: str, *, copies_target: bool) -> None:
        """`copies_target`: its K/V can be copied from the target's, so skipping a step costs nothing."""
        self.name, self._copies_target = name, copies_target
        self._unasked_steps = 0
        self._chains: Sequence[Sequence[int]] = ()
        self._making = NOT_AT_ALL
        self._took: dict[int, tuple[int, float]] = {}  # by number of drafts: steps that made them, and recent seconds

    def drafts_to_make(self, following: Strategy) -> int:
        """Return the number of drafts to make per request at the end of this step; `following`: the next step's
        strategy.

        0 is a pass that only keeps its K/V complete. A drafter that was not used for a while is not run at all. Missed
        tokens cost it acceptance later, but a pass in every step would cost all others time.
        """
        self._making = self._to_make(following)
        return self._making

    def _to_make(self, following: Strategy) -> int:
        if following.drafter == self.name:
            self._unasked_steps = 0
            return following.depth
        self._unasked_steps += 1
        return NOT_AT_ALL if self._copies_target or self._unasked_steps > REST_AFTER_STEPS else 0

    def seconds(self, measured: Callable[[int], float | None]) -> float:
        """Return the drafting time at the end of the step, from recent measurements of as many drafts (`measured`); 0
        if nothing was drafted, since a pass that only keeps K/V complete is part of any step."""
        drafts = self._making
        if drafts <= 0:
            return 0.0
        steps, seconds = self._took.get(drafts, (0, 0.0))
        if steps < _SURE or not steps % _ASK_AGAIN_STEPS:
            seconds = measured(drafts) or seconds
        self._took[drafts] = steps + 1, seconds
        return seconds

    def made(self, chains: Sequence[Sequence[int]]) -> None:
        """Set the drafts for `propose`: one chain per decoding request, in order."""
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
