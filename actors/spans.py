"""Join consecutive time spans of an actor's work, so that there is not one record per window or per item.

Pure: no clock; the caller provides labels and uses the results.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class Stretch(Generic[L]):
    label: L
    start_s: float
    end_s: float


class Joiner(Generic[K, L]):
    """Joins stretches of one key (an actor) with equal labels whose gap is at most `gap_s`; holds back one per key."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._open: dict[K, Stretch[L]] = {}

    def add(self, key: K, label: L, start_s: float, end_s: float) -> Stretch[L] | None:
        """Add a span; return the key's previous one if this one does not continue it."""
        last = self._open.get(key)
        if last is not None and last.label == label and last.start_s <= start_s <= last.end_s + self._gap_s:
            self._open[key] = Stretch(label, last.start_s, max(last.end_s, end_s))
            return None
        self._open[key] = Stretch(label, start_s, end_s)
        return last

    def take(self, key: K) -> Stretch[L] | None:
        """Return the open span of `key`, which has ended."""
        return self._open.pop(key, None)

    def flush(self) -> list[tuple[K, Stretch[L]]]:
        """Return all open spans."""
        stretches = list(self._open.items())
        self._open.clear()
        return stretches
