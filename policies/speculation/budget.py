"""The seam for budgets: how many tokens each request may draft, decided per request and engine step."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from policies.speculation.strategy import Strategy

Int64Array = NDArray[np.int64]


class DraftBudget(Protocol):
    """Asked before every step that drafts, told after it what came of it. A strategy says what a step drafts with and
    the most that any request gets; this divides it among them. No token depends on it, only time does.

    Picklable before its first call; clock-free and random only through its own seed. Both calls together cost a few
    microseconds. Evaluations are drafted for within its budgets, and it is not told of them.
    """

    def budgets(self, prompt_ids: Int64Array, drawn: Int64Array, room: Int64Array, strategy: Strategy) -> Int64Array:
        """[R]: the most tokens to draft for each request; below 0 is 0, and beyond `room` is room.

        prompt_ids, drawn, room: [R], read-only. drawn: response tokens that it has; room: how many its limit leaves.
        """

    def observe(self, prompt_ids: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """What a step drafted for each of its requests, and what of it stood; all [S]."""
