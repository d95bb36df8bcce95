"""Hidden states of the last verified tokens, for drafters that start from them. Keeps references and copies late.

A step adds the rows that its forward returned anyway; rows are selected only when a drafter requests them. States of
rejected drafts, of a slot's former request and of former weights are never served.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.batch.slots import SlotTable
from drafter.protocol import HiddenRows

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedStep:
    """Verified tokens of one forward: for slots[r] the positions first[r] .. first[r] + counts[r] - 1."""

    rows: Tensor  # [T, W], never written again; rejected drafts have rows too
    slots: Int64Array  # [R]
    first: Int64Array  # [R]
    counts: Int64Array  # [R]
    offsets: NDArray[np.int32]  # [R], the row of each request's first position
    path: Int64Array | None  # [R, K+1]: position first + j is row offsets + path[:, j]; None: row offsets + j


class HiddenStore:
    """Keeps the last `context_tokens` steps, with at most `context_tokens` rows per slot on average.

    Implements `drafter.protocol.HiddenSource`.
    """

    def __init__(self, table: SlotTable, context_tokens: int, empty: Tensor) -> None:
        """empty [0, W]: defines dtype and device."""
        slots = len(table.length)
        self._empty = empty
        self._table, self._max_steps, self._max_rows = table, context_tokens, context_tokens * slots
        self._steps: deque[tuple[int, ComputedStep]] = deque()  # numbered
        self._number = self._rows = 0
        self._since = np.zeros(slots, np.int64)  # number of the first step of the slot's request
        self._place = np.full(slots, -1, np.int64)  # scratch

    def begin(self, slot: int) -> None:
        """Register a new request in the slot."""
        self._since[slot] = self._number

    def clear(self) -> None:
        """Drop everything: the weights changed."""
        self._steps.clear()
        self._rows = 0

    def add(self, step: ComputedStep) -> None:
        steps, rows = self._steps, step.rows.shape[0]
        self._rows += rows
        # The newest step always stays, whatever its size: speculation continues from it.
        while steps and (len(steps) >= self._max_steps or self._rows > self._max_rows):
            self._rows -= steps.popleft()[1].rows.shape[0]
        steps.append((self._number, step))
        self._number += 1

    def last(self, slots: Int64Array, first_positions: Int64Array) -> HiddenRows:
        """See `HiddenSource.last`. The cost grows with the number of visited steps, not of kept ones."""
        wanted = self._table.length[slots] - 2  # the last missing position per request
        missing = wanted >= first_positions
        requests, positions, rows, tensors = [], [], [], []
        base = 0
        for number, step in reversed(self._steps):
            if not missing.any():
                break
            self._place[step.slots] = np.arange(len(step.slots))
            place = self._place[slots]
            self._place[step.slots] = -1
            missing &= number >= self._since[slots]
            here = np.flatnonzero(missing & (place >= 0))
            if not len(here):
                continue
            at = place[here]
            ahead = wanted[here] - step.first[at]  # wanted is this step's row number `ahead` of the request
            usable = (ahead >= 0) & (ahead < step.counts[at])
            missing[here[~usable]] = False  # a gap: nothing behind it is served
            here, at, ahead = here[usable], at[usable], ahead[usable]
            if not len(here):
                continue
            take = np.minimum(ahead + 1, wanted[here] - first_positions[here] + 1)
            owner = np.repeat(np.arange(len(here)), take)
            column = np.arange(len(owner)) - (take.cumsum() - take)[owner] + (ahead + 1 - take)[owner]
            requests.append(here[owner])
            positions.append(step.first[at[owner]] + column)
            inside = column if step.path is None else step.path[at[owner], column]
            rows.append(base + step.offsets[at[owner]] + inside)
            tensors.append(step.rows)
            base += step.rows.shape[0]
            wanted[here] -= take
            missing[here] = wanted[here] >= first_positions[here]
        offsets = np.zeros(len(slots) + 1, np.int64)
        if not tensors:
            return HiddenRows((self._empty,), np.zeros(0, np.int64), offsets)
        request = np.concatenate(requests)
        order = np.lexsort((np.concatenate(positions), request))
        offsets[1:] = np.bincount(request, minlength=len(slots)).cumsum()
        return HiddenRows(tuple(tensors), np.concatenate(rows)[order], offsets)
