"""Turns responses into reward calls, and their results into grades. Pure: makes no calls and never waits.

The keys alone decide which responses are called together, never the order of arrival. A batch is the next `size` keys
in the order of the round; a group is the keys of one prompt. A call is made when its last response has arrived, or at
the end of the round.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from actors.rewards.lanes import Lane
from config.rewards import RewardTerm
from contracts.rewards import Grade, GradeItem


@dataclass(frozen=True, slots=True)
class RewardCall:
    """Responses that a lane grades together; `keys` in the order of the round."""

    lane: int
    keys: tuple[int, ...]
    items: tuple[GradeItem, ...]


@dataclass(slots=True)
class _Unit:
    """Keys that are called together, with the items that have arrived."""

    keys: Sequence[int]
    items: dict[int, GradeItem] = field(default_factory=dict)


class Assembly:
    """Assembly of responses into calls, one round after another."""

    def __init__(self, terms: Sequence[RewardTerm], lanes: Sequence[Lane]) -> None:
        self._terms, self._lanes = terms, lanes
        self.begin(())

    def begin(self, groups: Sequence[Sequence[int]]) -> None:
        """Begin a round whose responses have these keys, by prompt. Any other key is its own group and batch."""
        keys = [key for group in groups for key in group]
        self._units: list[dict[int, _Unit]] = []  # by lane, then by key
        for lane in self._lanes:
            size = lane.size
            units = groups if size is None else [keys[i : i + size] for i in range(0, len(keys), size)]
            self._units.append({} if size == 1 else {key: unit for u in units for unit in [_Unit(u)] for key in u})
        self._graded: dict[int, dict[int, Grade]] = {}  # by key, then by lane

    def submit(self, key: int, item: GradeItem) -> list[RewardCall]:
        """Add a response; return the calls that it completes."""
        calls = []
        for index, lane in enumerate(self._lanes):
            read = item if lane.tokens or item.tokens is None else replace(item, tokens=None)
            unit = self._units[index].get(key)
            if unit is None:
                calls.append(RewardCall(index, (key,), (read,)))
                continue
            unit.items[key] = read
            if len(unit.items) == len(unit.keys):
                calls.append(_call(index, unit))
        return calls

    def flush(self) -> list[RewardCall]:
        """Return calls for the remaining items: no further response will come."""
        calls = []
        for index, units in enumerate(self._units):
            for key, unit in units.items():
                if unit.items and key == unit.keys[0]:
                    calls.append(_call(index, unit))
        return calls

    def answered(self, call: RewardCall, grades: Sequence[Grade]) -> list[tuple[int, Grade]]:
        """Take a call's grades; return (key, grade) of the responses that all lanes have now graded."""
        done = []
        for key, grade in zip(call.keys, grades, strict=True):
            by_lane = self._graded.setdefault(key, {})
            by_lane[call.lane] = grade
            if len(by_lane) == len(self._lanes):
                done.append((key, self._merged([by_lane[lane] for lane in range(len(self._lanes))])))
                del self._graded[key]
        return done

    def _merged(self, grades: Sequence[Grade]) -> Grade:
        if len(grades) == 1:
            return grades[0]
        found = {name: value for grade in grades for name, value in grade.parts.items()}
        parts = {term.label: found[term.label] for term in self._terms if term.label in found}
        notes = tuple(note for grade in grades for note in grade.notes)
        wrong = [grade for grade in grades if grade.error is not None]
        if wrong:
            first = next((grade for grade in wrong if grade.bad_record), wrong[0])
            return replace(first, parts=parts, notes=notes)
        return weighed(self._terms, parts, notes)


def weighed(terms: Sequence[RewardTerm], parts: dict[str, float], notes: tuple[str, ...]) -> Grade:
    """Return the grade of a response from its values of all these terms."""
    value = math.fsum(term.weight * parts[term.label] for term in terms)
    if not math.isfinite(value):
        return Grade(value=0.0, parts=parts, error=f"the weighted sum is {value}", notes=notes)
    return Grade(value=value, parts=parts, notes=notes)


def _call(lane: int, unit: _Unit) -> RewardCall:
    """Return a call with the unit's items, and empty the unit."""
    keys = tuple(key for key in unit.keys if key in unit.items)
    call = RewardCall(lane, keys, tuple(unit.items[key] for key in keys))
    unit.items = {}
    return call
