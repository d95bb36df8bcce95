"""Several training sets in one order, by their weights. Chooses the next set; each set's own order is a PromptOrder.

The next prompt is from the set that is furthest behind its share. After any number of prompts, each set has had its
share to within one prompt for each other set. This holds in every RL step, not only on average.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from actors.data.errors import DataError
from actors.data.order import PromptOrder
from actors.data.prompts import PromptSet


class MixedOrder:
    """Yields indices of range(sum of sizes) without end: each set's once per epoch of its own."""

    def __init__(self, sets: Mapping[str, tuple[int, float]], seed: int, shuffle: bool) -> None:
        """`sets`: (number of prompts, weight above 0) by name, in the order of their indices."""
        weights = [weight for _, weight in sets.values()]
        self._names = list(sets)
        self._shares = [weight / sum(weights) for weight in weights]
        self._first = list(accumulate((size for size, _ in sets.values()), initial=0))[:-1]
        self._orders = [PromptOrder(size, seed, shuffle, stream=name) for name, (size, _) in sets.items()]
        self._taken = [0] * len(sets)  # prompts of each set since these shares apply

    def take(self, k: int) -> list[tuple[int, int]]:
        """Return the next k (epoch of its set, index) pairs."""
        if k < 0:
            raise ValueError(f"cannot take {k} prompts")
        found = []
        for _ in range(k):
            after = sum(self._taken) + 1
            owed = [after * share - taken for share, taken in zip(self._shares, self._taken, strict=True)]
            one = owed.index(max(owed))
            self._taken[one] += 1
            ((epoch, index),) = self._orders[one].take(1)
            found.append((epoch, self._first[one] + index))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers: prompts taken of each set, and the state of its own order."""
        orders = [order.state_dict() for order in self._orders]
        return {"sets": dict(zip(self._names, orders, strict=True)), "taken": self._taken[:], "shares": self._shares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Other shares, which must be allowed by name (--allow data.sets), apply from now
        on. Raises DataError if it belongs to other sets, other data or another seed."""
        theirs = state.get("sets")
        if theirs is None or list(theirs) != self._names:
            of = "one set, data.train" if theirs is None else f"the sets {', '.join(theirs)}"
            raise DataError(
                f"the checkpoint's data order is of {of}, and data.sets has {', '.join(self._names)}: resume with the "
                "same sets, or start a new run"
            )
        for name, order in zip(self._names, self._orders, strict=True):
            order.load_state_dict(theirs[name])
        same = [float(share) for share in state["shares"]] == self._shares
        self._taken = [int(count) for count in state["taken"]] if same else [0] * len(self._names)


def make_order(prompts: PromptSet, seed: int, shuffle: bool) -> PromptOrder | MixedOrder:
    """Make the order of data.train, or of data.sets by their weights."""
    if not prompts.sets:
        return PromptOrder(len(prompts), seed, shuffle)
    return MixedOrder({one.name: (one.report.used, one.weight) for one in prompts.sets}, seed, shuffle)
