"""Queue of training data: a few packs of records, checked one by one. Never touches a tensor."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from contracts.records import SequenceRecord
from contracts.spot import Skipped
from models.manifest import ITEM_BYTES

LOW_PACKS, WANTED_PACKS, MOST_PACKS = 2, 4, 8  # request below the first, up to the second; the third is the limit


class Feeding:
    """FIFO queue, measured in rows (one row of states per position)."""

    def __init__(self, pack_rows: int, vocab_size: int, hidden_size: int, min_width: int) -> None:
        self._pack_rows, self._vocab_size = pack_rows, vocab_size
        self._hidden_size, self._min_width = hidden_size, min_width
        self._records: deque[SequenceRecord] = deque()
        self._rows = 0
        self._asked = False

    def add(self, records: Sequence[SequenceRecord]) -> list[Skipped]:
        """Add valid records that fit the queue; return the others, counted by reason."""
        self._asked = False
        reasons: dict[str, int] = {}
        for record in records:
            reason = self._flaw(record)
            if not reason and self._rows >= MOST_PACKS * self._pack_rows:
                reason = f"more than {MOST_PACKS} packs are waiting: feed what NeedData asks for"
            if reason:
                reasons[reason] = reasons.get(reason, 0) + 1
            else:
                self._records.append(record)
                self._rows += record.rows
        return [Skipped(count, reason) for reason, count in reasons.items()]

    def next_pack(self) -> list[SequenceRecord]:
        """Return records of one kind with at most a pack's rows, or one longer record; empty if the queue is."""
        pack: list[SequenceRecord] = []
        rows = 0
        while self._records:
            record = self._records[0]
            same = not pack or (record.width, record.dtype) == (pack[0].width, pack[0].dtype)
            if pack and not (same and rows + record.rows <= self._pack_rows):
                break
            pack.append(self._records.popleft())
            rows += record.rows
        self._rows -= rows
        return pack

    def put_back(self, pack: Sequence[SequenceRecord]) -> None:
        """Make this the next pack again: it was not trained on."""
        self._records.extendleft(reversed(pack))
        self._rows += sum(record.rows for record in pack)

    def wanted_rows(self) -> int:
        """Return the number of rows to request: 0 while the queue is long enough, or a request is pending."""
        if self._asked or self._rows >= LOW_PACKS * self._pack_rows:
            return 0
        self._asked = True
        return WANTED_PACKS * self._pack_rows - self._rows

    def clear(self) -> None:
        self._records.clear()
        self._rows, self._asked = 0, False

    def __len__(self) -> int:
        return len(self._records)

    def _flaw(self, record: SequenceRecord) -> str:
        """Return why a record is unusable, or ""."""
        item = ITEM_BYTES.get(record.dtype)
        if item is None:
            return f"states of dtype {record.dtype}"
        if record.width < self._min_width or record.width % self._hidden_size:
            return f"rows of {record.width} scalars: this drafter reads {self._min_width}, the target's size is " + str(
                self._hidden_size
            )
        if record.states.shape[1:] != (record.width * item,):
            return f"rows of {record.states.shape[1]} bytes for {record.width} scalars of {record.dtype}"
        if record.first < 0 or record.first + record.rows >= len(record.tokens):
            return "states of positions that were never fed"
        tokens = record.tokens
        if int(np.min(tokens)) < 0 or int(np.max(tokens)) >= self._vocab_size:
            return f"tokens outside the vocabulary of {self._vocab_size}"
        return ""
