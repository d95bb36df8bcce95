"""Reading positions of the running requests' markers, and which requests a rule may end now. actors.engine.stopping
decides what ends a response, and how.

Two implementations: `PlainReader` is the reference, the native one (native/stop_rules.h) takes a tenth of a microsecond
per step. Both are lazy: a response that is too short for its rule is not read.
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

_KEPT_MARKERS = 8  # unused markers to keep: the next RL step has the same


class NativeReader:
    """`PlainReader` by the native extension."""

    def __init__(self, table: SlotTable, vocab_size: int) -> None:
        self._reader = kernels.StopReader(table)  # type: ignore[union-attr]
        self._vocab_size = vocab_size
        self._markers: OrderedDict[bytes, Any] = OrderedDict()  # least recently used first
        self._read_by: dict[int, list[Any]] = {}  # by slot: objects to keep alive
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
    """Marker reading over one SlotTable, in Python."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._watches: dict[int, _Watch] = {}

    def begin(self, slot: int, rule: StopRule) -> None:
        """Register a request that was loaded into `slot`."""
        self._watches[slot] = watch = _Watch(rule=rule, due=_due(rule))
        watch.wake = _next_wake(watch, 0)

    def end(self, slot: int) -> None:
        self._watches.pop(slot, None)

    def spare(self, slot: int) -> None:
        """Let the request continue past its give-up limit."""
        self._watches[slot].due = NOWHERE

    def look(self) -> list[int] | None:
        """Return the slots that their rules may end with their present tokens, in any order; None: no slot.

        Includes slots at their give-up limit, until `spare` is called."""
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
        """Return the markers found in the slot's present tokens."""
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
    """Return the fastest installed implementation."""
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
    """Return the smallest number of tokens that can end a response that is read up to `tokens` and not over."""
    rule, wakes = watch.rule, [NOWHERE]
    if rule.strings is not None:
        wakes.append(tokens + 1)
    if rule.answer is not None:
        wakes.append(_answered(rule, min(watch.found.answer, tokens + 1)))
    if watch.due > tokens:
        wakes.append(watch.due)
    return min(wakes)
