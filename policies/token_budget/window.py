"""The newest natural lengths of responses, as if none were given up. Owns the window and its quantiles; decides
nothing.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any


class LengthWindow:
    """The newest `size` kept responses, each with the number of responses that it stands for.

    Without weights, late ones would be missing, and thresholds derived from it would fall step by step.
    """

    def __init__(self, size: int) -> None:
        self._entries: deque[tuple[int, float]] = deque(maxlen=size)
        self._ascending: list[tuple[int, float]] | None = None  # entries; None: to be sorted

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, tokens: int, weight: float) -> None:
        """Add a response that was not given up, in canonical order. `weight`: its training weight."""
        self._entries.append((tokens, weight))
        self._ascending = None

    def mean(self) -> float | None:
        """Return the mean length in tokens; None before the first."""
        total = sum(weight for _, weight in self._entries)
        return sum(tokens * weight for tokens, weight in self._entries) / total if total else None

    def quantile(self, q: float) -> int | None:
        """Return the smallest length that at least `q` of the weight does not exceed; None before the first
        response."""
        if self._ascending is None:
            self._ascending = sorted(self._entries)
        below, wanted = 0.0, q * sum(weight for _, weight in self._ascending)
        for tokens, weight in self._ascending:
            below += weight
            if below >= wanted:
                return tokens
        return None

    def mean_excess(self, tokens: int) -> float:
        """Return how much longer than `tokens` the longer ones are on average; 0.0 if there are none."""
        late = [(length - tokens, weight) for length, weight in self._entries if length > tokens]
        return sum(more * weight for more, weight in late) / sum(weight for _, weight in late) if late else 0.0

    def held_up(self, tokens: int, responses: int) -> float:
        """Seconds per token behind `tokens` over those before, >= 1, where all of so many responses decode at once and
        a step takes as long for one as for all: the longest alone decides how many steps there are."""
        longest = self.quantile(1 - 1 / max(responses, 1))
        behind = sum(max(length - tokens, 0) * weight for length, weight in self._entries)
        before = sum(min(length, tokens) * weight for length, weight in self._entries)
        if longest is None or longest <= tokens or not behind or not before:
            return 1.0
        return max((longest - tokens) / behind * before / tokens, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"entries": [list(entry) for entry in self._entries]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._entries.clear()
        self._ascending = None
        self._entries.extend((int(tokens), float(weight)) for tokens, weight in state["entries"])
