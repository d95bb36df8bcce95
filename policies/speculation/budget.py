"""Interface for draft budgets: how many tokens each request may draft, per request and engine step."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from config.strategy import Strategy
from policies.steps import Load

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


class DraftBudget(Protocol):
    """Called before every step that drafts. A strategy defines the drafts of a step and the maximum per request; this
    divides the drafts among the requests. It affects no token, only time.

    Picklable before its first call; clock-free, and random only through its own seed. `budgets` costs a few
    microseconds per step on average. `begin` and `end` are called for decoded requests except evaluations; `budgets`
    covers all.
    """

    def begin(self, slot: int, prompt_tokens: Int32Array, drawn: int, limit: int) -> None:
        """A request takes `slot`. It has `drawn` response tokens already, and gets at most `limit`."""

    def end(self, slot: int, drawn: int, *, finished: bool, ended: bool) -> None:
        """The request leaves `slot` with `drawn` response tokens. Not `finished`: preempted or aborted. `ended`: by
        itself, not at its limit."""

    def remember(self, prompts: list[Int32Array], responses: list[Int32Array]) -> None:
        """Take rollouts that other workers finished."""

    def new_target(self) -> None:
        """The target model has other weights."""

    def save(self, directory: str) -> None:
        """Write the state that a new process needs, beside the drafters' files. Raises OSError."""

    def load(self, directory: str) -> None:
        """Restore what `save` wrote. With a missing or unreadable file the state stays as it is, with a warning."""

    def budgets(
        self, load: Load, slots: Int64Array, drawn: Int64Array, room: Int64Array, strategy: Strategy
    ) -> Int64Array:
        """Return [R]: the most tokens to draft for each request; below 0 is 0, and beyond `room` is room.

        slots, drawn, room: [R], read-only. drawn: its response tokens so far. room: tokens left to its limit.
        """
