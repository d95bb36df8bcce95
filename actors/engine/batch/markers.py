"""How far the markers of running requests have been read, and whom a rule may end now. Owns readings, never an end:
what ends a response, and how, is said by actors.engine.stopping.

Two implementations: `PlainReader` says what is meant, the native one (native/stop_rules.h) does it in a tenth of a
microsecond per step. Both are lazy: with fewer tokens than a rule can end it with, a response is not looked at.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.slots import SlotTable
from actors.engine.stopping import NOWHERE, Found, rows_of, run, table_of
from contracts.rollout import Marker, StopRule
from models.ops.native import kernels

_KEPT_MARKERS = 8  # that nobody reads at present: the next RL step has the same


class NativeReader:
    """`PlainReader` by the native extension."""

    def __init__(self, table: SlotTable, vocab_size: int) -> None:
        self._reader = kernels.StopReader(table)  # type: ignore[union-attr]
        self._vocab_size = vocab_size
        self._markers: OrderedDict[bytes, Any] = OrderedDict()  # those used last come last
        self._read_by: dict[int, list[Any]] = {}  # by slot: what must not go away
        self.look, self.spare = self._reader.look, self._reader.spare

    def begin(self, slot: int, rule: StopRule) -> None:
        markers = [None if m is None else self._marker(m) for m in (rule.strings, rule.answer)]
        self._reader.begin(slot, *markers, rule.poll_from_tokens, rule.grace_tokens, _due(rule))
        self._read_by[slot] = markers

    def _marker(self, marker: Marker) -> Any:
        made = self._markers.pop(marker.key, None)
        if made is None:
            made = kernels.StopMarker(rows_of(marker, self._vocab_size), table_of(marker))  # type: ignore[union-attr]
        self._markers[marker.key] = made
        while len(self._markers) > _KEPT_MARKERS:
            self._markers.popitem(last=False)
        return made

    def end(self, slot: int) -> None:
        self._reader.end(slot)
        self._read_by.pop(slot, None)

    def found(self, slot: int) -> Found:
        return Found(*self._reader.found(slot))


@dataclass(slots=True, kw_only=True)
class _Watch:
    rule: StopRule
    due: int
    wake: int = 0  # with fewer tokens nothing can end it
    read: int = 0  # tokens
    states: tuple[int, int] = (0, 0)
    found: Found = field(default_factory=Found)


class PlainReader:
    """Over one SlotTable, in Python."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._watches: dict[int, _Watch] = {}

    def begin(self, slot: int, rule: StopRule) -> None:
        """A request was loaded into `slot`."""
        self._watches[slot] = watch = _Watch(rule=rule, due=_due(rule))
        watch.wake = _next_wake(watch, 0)

    def end(self, slot: int) -> None:
        self._watches.pop(slot, None)

    def spare(self, slot: int) -> None:
        """Its coin lets it run on."""
        self._watches[slot].due = NOWHERE

    def look(self) -> list[int] | None:
        """The slots that their rules end with the tokens they have now, in any order; None: no slot. One at which the
        coin is to be asked is among them, until it is spared."""
        table, ending = self._table, []
        for slot, watch in self._watches.items():
            tokens = int(table.length[slot] - table.prompt_length[slot])
            if tokens < watch.wake:
                continue
            self._read(slot, watch)
            if _is_over(watch, tokens):
                ending.append(slot)
            else:
                watch.wake = _next_wake(watch, tokens)
        return ending or None

    def found(self, slot: int) -> Found:
        """In the tokens that it has now."""
        self._read(slot, self._watches[slot])
        return self._watches[slot].found

    def _read(self, slot: int, watch: _Watch) -> None:
        start = int(self._table.prompt_length[slot])
        response = self._table.tokens[slot, start + watch.read : int(self._table.length[slot])]
        markers = (watch.rule.strings, watch.rule.answer)
        ends = [
            _read_on(marker, response, state, found, watch.read)
            for marker, state, found in zip(
                markers, watch.states, (watch.found.strings, watch.found.answer), strict=True
            )
        ]
        watch.states, watch.found = (ends[0][0], ends[1][0]), Found(ends[0][1], ends[1][1])
        watch.read += len(response)


StopReader = NativeReader | PlainReader


def stop_reader(table: SlotTable, vocab_size: int) -> StopReader:
    """The fastest implementation that is installed."""
    return NativeReader(table, vocab_size) if hasattr(kernels, "StopReader") else PlainReader(table)


def _due(rule: StopRule) -> int:
    return NOWHERE if rule.give_up_at_tokens is None else rule.give_up_at_tokens


def _read_on(marker: Marker | None, tokens: NDArray[np.int32], state: int, found: int, before: int) -> tuple[int, int]:
    if marker is None or found != NOWHERE:
        return state, found
    state, count = run(marker, tokens, state)
    return state, NOWHERE if count == NOWHERE else before + count


def _answered(rule: StopRule, found: int) -> int:
    return max(found, rule.poll_from_tokens) + rule.grace_tokens


def _is_over(watch: _Watch, tokens: int) -> bool:
    found, due = watch.found, watch.due
    given_up = due <= tokens and due < found.answer
    return found.strings <= tokens or _answered(watch.rule, found.answer) <= tokens or given_up


def _next_wake(watch: _Watch, tokens: int) -> int:
    """The fewest tokens with which one that is not over with `tokens`, and is read so far, can be."""
    rule, wakes = watch.rule, [NOWHERE]
    if rule.strings is not None:
        wakes.append(tokens + 1)
    if rule.answer is not None:
        wakes.append(_answered(rule, min(watch.found.answer, tokens + 1)))
    if watch.due > tokens:
        wakes.append(watch.due)
    return min(wakes)
