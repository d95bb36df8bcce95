"""The seam for budgets: how many tokens each request may draft, decided per request and engine step."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from config.strategy import Strategy
from policies.steps import Load

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


class DraftBudget(Protocol):
    """Asked before every step that drafts. A strategy says what a step drafts with and the most that any request gets;
    this divides it among them. No token depends on it, only time does.

    Picklable before its first call; clock-free and random only through its own seed. `budgets` costs a few microseconds
    per step in the mean. It is told of the requests that the engine decodes, but not of evaluations, and asked about
    all of them.
    """

    def begin(self, slot: int, prompt_tokens: Int32Array, drawn: int, limit: int) -> None:
        """A request takes `slot`; it has `drawn` response tokens already, and gets `limit` at most."""

    def end(self, slot: int, drawn: int, *, finished: bool, ended: bool) -> None:
        """The request leaves `slot` with so many response tokens. Not `finished`: preempted or aborted. `ended`: by
        itself, not at its limit."""

    def remember(self, prompts: list[Int32Array], responses: list[Int32Array]) -> None:
        """Rollouts that other workers finished."""

    def new_target(self) -> None:
        """The target model has other weights."""

    def save(self, directory: str) -> None:
        """Write what would be lost with the process, beside the drafters' files. Raises OSError."""

    def load(self, directory: str) -> None:
        """Restore what `save` wrote; a missing or unreadable file leaves it as it is, with a warning."""

    def budgets(
        self, load: Load, slots: Int64Array, drawn: Int64Array, room: Int64Array, strategy: Strategy
    ) -> Int64Array:
        """[R]: the most tokens to draft for each request; below 0 is 0, and beyond `room` is room.

        slots, drawn, room: [R], read-only. drawn: response tokens that it has; room: how many its limit leaves.
        """
