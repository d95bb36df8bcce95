"""The engine's draft budget. A failing budget is dropped; then every request drafts as its strategy allows.

Passes slot data to the budget, which makes the decisions. Never changes a token.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.slots import SlotTable
from config.strategy import Strategy
from policies.speculation.budget import DraftBudget
from policies.steps import Load

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]

_log = logging.getLogger(__name__)


class Budgeting:
    """Draft budgets of one engine. Does nothing without a budget."""

    def __init__(self, table: SlotTable, budget: DraftBudget | None) -> None:
        self._table, self._budget = table, budget

    @property
    def active(self) -> bool:
        return self._budget is not None

    def begin(self, slot: int) -> None:
        table = self._table
        if self._budget is None or table.evaluation[slot]:
            return
        prompt, length = int(table.prompt_length[slot]), int(table.length[slot])
        limit, known = int(table.limit[slot]) - prompt, table.tokens[slot, : int(table.noise_origin[slot])]
        with self._guarded():
            self._budget.begin(slot, known, length - prompt, limit)

    def end(self, slot: int, finished: bool) -> None:
        table = self._table
        if self._budget is None or table.evaluation[slot]:
            return
        length = int(table.length[slot])
        drawn = length - int(table.prompt_length[slot])
        last, stops = table.tokens[slot, length - 1], table.stop[slot]
        ended = finished and bool(length < table.limit[slot] or (stops == last).any())
        with self._guarded():
            self._budget.end(slot, drawn, finished=finished, ended=ended)

    def remember(self, prompts: list[Int32Array], responses: list[Int32Array]) -> None:
        if self._budget is not None:
            with self._guarded():
                self._budget.remember(prompts, responses)

    def new_target(self) -> None:
        if self._budget is not None:
            with self._guarded():
                self._budget.new_target()

    def save(self, directory: str) -> None:
        """Save the budget. Raises OSError: a full disk is not the budget's fault."""
        if self._budget is not None:
            self._budget.save(directory)

    def load(self, directory: str) -> None:
        if self._budget is not None:
            with self._guarded():
                self._budget.load(directory)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Drop a budget that raises."""
        try:
            yield
        except Exception:
            self._give_up()

    def room(
        self, load: Load, slots: Int64Array, drawn: Int64Array, room: Int64Array, strategy: Strategy
    ) -> Int64Array:
        """Return the draft limit [R] of each request, at most its `room`, which becomes read-only."""
        if self._budget is None:
            return room
        room.flags.writeable = False
        try:
            given = np.asarray(self._budget.budgets(load, slots, drawn, room, strategy))
            if given.shape != room.shape or given.dtype.kind != "i":
                raise ValueError(f"budgets are {given.dtype} {list(given.shape)}, not integers [{len(room)}]")
        except Exception:
            self._give_up()
            return room
        return np.clip(given.astype(np.int64, copy=False), 0, room)

    def _give_up(self) -> None:
        _log.exception("the draft budget failed; from now on every request drafts what its strategy allows")
        self._budget = None
