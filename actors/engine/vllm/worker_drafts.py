"""What a network of vLLM's drafted at the end of the step before, as one of our drafters. Owns it for one step."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from actors.engine.vllm.drafter_passes import NOT_AT_ALL
from config.strategy import Strategy
from drafter.protocol import BatchView, Drafter, Drafts

REST_AFTER_STEPS = 64
_SURE, _ASK_AGAIN_STEPS = 4, 16  # times are asked for in the first steps, and then once in so many: of ranks it costs


class WorkerDrafter(Drafter):
    """Drafter `name`, whose tokens come from where the model is executed; weights and K/V are there."""

    def __init__(self, name: str, *, copies_target: bool) -> None:
        """`copies_target`: its K/V can be had from the target's, so a step that it misses costs it nothing."""
        self.name, self._copies_target = name, copies_target
        self._unasked_steps = 0
        self._chains: Sequence[Sequence[int]] = ()
        self._making = NOT_AT_ALL
        self._took: dict[int, tuple[int, float]] = {}  # by drafts: steps that made so many, and seconds lately

    def drafts_to_make(self, following: Strategy) -> int:
        """At the end of this step, for each request; `following`: the strategy of the next one.

        0 is a pass that keeps its K/V whole. One that nobody has asked for in a while is not run at all: what it has
        missed costs it acceptance when it is asked again, a pass in every step costs all others their time.
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
        """That drafting took at the end of the step, by what was measured of as many drafts lately (`measured`); 0
        where nothing was drafted: a pass that keeps its K/V whole is part of any step."""
        drafts = self._making
        if drafts <= 0:
            return 0.0
        steps, seconds = self._took.get(drafts, (0, 0.0))
        if steps < _SURE or not steps % _ASK_AGAIN_STEPS:
            seconds = measured(drafts) or seconds
        self._took[drafts] = steps + 1, seconds
        return seconds

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
