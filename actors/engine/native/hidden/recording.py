"""Hidden states of whole sequences, for drafter training. Chooses the recorded requests, and holds their rows until
delivery. Waits for the device only when it copies.

A step adds a reference to the rows that its forward returned anyway. Every `CHUNK_STEPS` steps the rows of recorded
requests are selected, all at once, into host memory. A sequence is delivered with the first chunk after its end. It
never contains rows of rejected drafts, of a slot's former request or of a preempted run (only the recomputed ones), nor
rows that attended to K/V of other weights.

Rollouts do not depend on it: a failure here costs records, is reported once, and never reaches the engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.batch.plan import PromptEntry
from actors.engine.batch.slots import SlotTable
from actors.engine.native.hidden.budget import Share, request_draw
from actors.engine.native.hidden.recent import ComputedStep
from contracts.records import SequenceRecord
from contracts.rollout import Recorded

CHUNK_STEPS = 256
CHUNK_BYTES = 32 << 20  # most bytes of step outputs held before a chunk is selected

Int64Array = NDArray[np.int64]
NOBODY = -1


@dataclass(slots=True, eq=False)
class _Rows:
    """Rows of consecutive positions from `first` on, in their own host memory."""

    first: int
    parts: list[Tensor] = field(default_factory=list)
    count: int = 0

    def append(self, part: Tensor) -> None:
        self.parts.append(part)
        self.count += part.shape[0]


@dataclass(slots=True, eq=False, kw_only=True)
class _Sequence:
    """A request between admission and delivery. `own` is None for one that only computes a prompt for others."""

    slot: int
    draw: float
    prompt: _Rows  # positions 0 .. reusable - 1, shared by all requests that share the prompt's K/V
    reusable: int
    own: _Rows | None  # rows from `reusable` on
    writer: bool  # computes the prompt's rows
    tokens: NDArray[np.int32] | None = None  # once it has ended
    prompt_length: int = 0
    request_id: int = -1

    @property
    def rows(self) -> int:
        return 0 if self.own is None else self.prompt.count + self.own.count

    def take(self, rows: Tensor, position: int) -> None:
        """Append rows of positions from `position` on."""
        ours = max(self.reusable - position, 0) if self.writer else 0
        if ours:
            self.prompt.append(rows[:ours])
        if self.own is not None and ours < rows.shape[0]:
            self.own.append(rows[ours:])


class SequenceRecorder:
    """Records requests of the slots of `table` while their bytes stay within `max_bytes` per version of the weights.

    empty [0, W]: defines width, dtype and device of the rows. Implements `scheduler.SlotWatcher`.
    """

    def __init__(self, table: SlotTable, max_bytes: int, empty: Tensor, version: int) -> None:
        self._table, self._version = table, version
        self._width, self._dtype = empty.shape[1], empty.dtype
        self._row_bytes = self._width * empty.element_size() + 4  # with its token
        self.on = True  # else no further request is recorded
        self._share = Share(max_bytes // self._row_bytes)
        self._owner = np.full(len(table.length), NOBODY, np.int64)  # by slot
        self._recorded = 0  # slots with an owner
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._steps: list[tuple[ComputedStep, Int64Array]] = []  # with each request's owner
        self._held_bytes = 0
        self._room: Tensor | None = None
        self._ended: list[int] = []  # sequences to deliver
        self._skipped = 0
        self._seconds = 0.0
        self._failure: str | None = None  # the first one; "" once reported

    @property
    def at_work(self) -> bool:
        """Whether it needs the rows of steps."""
        return self._recorded > 0

    # Requests.

    def submitted(self, limit_tokens: int) -> None:
        """Account for a submitted request of at most this many tokens."""
        self._share.foresee(limit_tokens)

    def begin(self, slot: int, prompt: PromptEntry | None) -> None:
        """See SlotWatcher."""
        with self._guarded():
            self._begin(slot, prompt)

    def _begin(self, slot: int, prompt: PromptEntry | None) -> None:
        table = self._table
        if not self.on or table.evaluation[slot]:
            return  # evaluations are no training data
        writer = prompt is not None and not prompt.ready and prompt.writer == table.request_id[slot]
        draw = request_draw(int(table.noise_key[slot]))
        sampled = draw < self._share.threshold
        if prompt is None:
            rows, reusable = _Rows(0), 0
        elif writer:
            rows, reusable = _Rows(0), prompt.reusable_tokens
            prompt.rows = rows
        elif isinstance(prompt.rows, _Rows):
            rows, reusable = prompt.rows, prompt.reusable_tokens
        else:
            return  # its prompt was computed while nothing was recorded
        if not sampled and not (writer and self._share.threshold > 0):
            return
        self._owner[slot] = self._next
        self._sequences[self._next] = _Sequence(
            slot=slot,
            draw=draw,
            prompt=rows,
            reusable=reusable,
            own=_Rows(reusable) if sampled else None,
            writer=writer,
        )
        self._next += 1
        self._recorded += 1

    def end(self, slot: int, finished: bool) -> None:
        """See SlotWatcher."""
        with self._guarded():
            self._end(slot, finished)

    def _end(self, slot: int, finished: bool) -> None:
        owner = int(self._owner[slot])
        if owner != NOBODY:
            self._owner[slot] = NOBODY
            self._recorded -= 1
        if not finished:
            # Its rows in the present chunk may belong to the shared prompt: dropped once they are selected.
            if owner != NOBODY:
                self._sequences[owner].own = None
            return
        if self._table.evaluation[slot]:
            return
        length = int(self._table.length[slot])
        self._share.ended(length - 1)
        if owner != NOBODY and self._sequences[owner].own is not None:
            self._close(owner, length)
        else:
            self._skipped += self.on

    def _close(self, owner: int, length: int) -> None:
        sequence, table = self._sequences[owner], self._table
        slot = sequence.slot
        sequence.tokens = table.tokens[slot, :length].copy()
        sequence.prompt_length, sequence.request_id = int(table.prompt_length[slot]), int(table.request_id[slot])
        self._ended.append(owner)

    # Steps.

    def add(self, step: ComputedStep) -> Recorded | None:
        """Add a step's rows; return the sequences that a chunk completed."""
        if not self.at_work:
            return None
        start_s = perf_counter()
        self._steps.append((step, self._owner[step.slots]))
        self._held_bytes += step.rows.nbytes
        full = len(self._steps) >= CHUNK_STEPS or self._held_bytes >= CHUNK_BYTES
        self._seconds += perf_counter() - start_s
        return self.flush() if full else None

    def flush(self) -> Recorded | None:
        """Select the rows of the steps so far, and deliver complete sequences. Also call it if no step follows."""
        start_s = perf_counter()
        records: list[SequenceRecord] = []
        with self._guarded():
            self._pick()
            self._forget()
            self._shrink()
            records += self._deliver()
        self._seconds += perf_counter() - start_s
        if not records and not self._skipped and not self._failure:
            return None
        event = Recorded(tuple(records), self._seconds, self._skipped, self._failure or "")
        self._seconds, self._skipped = 0.0, 0
        if self._failure:
            self._failure = ""
        return event

    def _deliver(self) -> list[SequenceRecord]:
        """Return the records of ended sequences; one that fails is skipped."""
        records: list[SequenceRecord] = []
        for owner in self._ended:
            try:
                records.append(self._record(self._sequences.pop(owner)))
            except Exception as error:
                self._failed(error)
                self._skipped += 1
        self._ended.clear()
        self._share.spend(sum(record.rows + 1 for record in records))
        return records

    def new_target(self, version: int) -> Recorded | None:
        """Prepare for weights of another `version`.

        Delivers complete sequences, and the part of running ones that the old weights computed, if it exceeds the
        prompt. Those are not recorded further."""
        with self._guarded():
            self._pick()
            for slot in np.flatnonzero(self._owner != NOBODY):
                owner = int(self._owner[slot])
                sequence = self._sequences[owner]
                self._share.ended(sequence.rows)
                if sequence.rows > self._table.prompt_length[slot]:
                    self._close(owner, sequence.rows + 1)
        event = self.flush()
        self._clear()
        self._version = version
        self._share.renew()
        return event

    # Failures.

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """End all running recordings if the block raises; recording resumes with the next version."""
        try:
            yield
        except Exception as error:
            self._failed(error)
            self._skipped += sum(sequence.own is not None for sequence in self._sequences.values())
            self._clear()
            self._share.lower(0.0)

    def _failed(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = f"{type(error).__name__}: {error}"

    def _clear(self) -> None:
        self._owner.fill(NOBODY)
        self._recorded = self._held_bytes = 0
        self._sequences.clear()
        self._ended.clear()
        self._steps.clear()

    # Rows.

    def _pick(self) -> None:
        """Move the rows of recorded requests out of the steps."""
        steps, self._steps, self._held_bytes = self._steps, [], 0
        if not steps:
            return
        requests = [len(owner) for _, owner in steps]
        sizes = np.array([step.rows.shape[0] for step, _ in steps])
        owner = np.concatenate([owner for _, owner in steps])
        kept = np.flatnonzero(owner != NOBODY)
        if not len(kept):
            return
        base = np.repeat(sizes.cumsum() - sizes, requests)
        base += np.concatenate([step.offsets[:n] for (step, _), n in zip(steps, requests, strict=True)])
        owner, base = owner[kept], base[kept]
        first = np.concatenate([step.first for step, _ in steps])[kept]
        counts = np.concatenate([step.counts for step, _ in steps])[kept]
        index = np.repeat(np.arange(len(kept)), counts)  # [n], over all rows
        column = np.arange(len(index)) - (counts.cumsum() - counts)[index]
        inside = _along_paths([step.path for step, _ in steps], requests, kept[index], column)
        # steps are consecutive, so a stable order by owner keeps positions ascending
        order = np.argsort(owner[index], kind="stable")
        owners, positions = owner[index][order], (first[index] + column)[order]
        rows = self._joined([step.rows for step, _ in steps])
        picked = torch.from_numpy((base[index] + inside)[order])
        if rows.device.type != "cpu":  # one transfer for all
            rows, picked = rows.index_select(0, picked.to(rows.device)).cpu(), torch.arange(len(picked))
        edges = np.flatnonzero(np.diff(owners, prepend=-1, append=-1)).tolist()
        for a, b in pairwise(edges):
            owner_id = int(owners[a])
            sequence = self._sequences.get(owner_id)
            if sequence is not None:
                # its own memory, small enough for quick reuse: fresh pages cost more than copies
                sequence.take(rows.index_select(0, picked[a:b]), int(positions[a]))
                if sequence.own is None and sequence.prompt.count >= sequence.reusable:
                    self._release(owner_id)

    def _forget(self) -> None:
        """Drop sequences that left their slot and will not be delivered: their rows are selected already."""
        for owner, sequence in list(self._sequences.items()):
            if sequence.own is None and self._owner[sequence.slot] != owner:
                del self._sequences[owner]

    def _joined(self, rows: list[Tensor]) -> Tensor:
        """Concatenate rows in a buffer that the next call reuses."""
        total = sum(part.shape[0] for part in rows)
        if self._room is None or self._room.shape[0] < total:
            self._room = rows[0].new_empty(total, self._width)
        return torch.cat(rows, out=self._room[:total])

    def _shrink(self) -> None:
        """Drop sequences until held and delivered ones together fit the budget."""
        held = {owner: s.rows + 1 for owner, s in self._sequences.items() if s.own is not None}
        excess = sum(held.values()) - self._share.room
        for owner in sorted(held, key=lambda owner: self._sequences[owner].draw, reverse=True):
            if excess <= 0:
                return
            excess -= held[owner]
            sequence = self._sequences[owner]
            self._share.lower(sequence.draw)
            sequence.own = None
            if owner in self._ended:
                self._ended.remove(owner)
                self._skipped += 1
            if not sequence.writer or sequence.prompt.count >= sequence.reusable:
                self._release(owner)

    def _release(self, owner: int) -> None:
        """Drop a sequence that needs no more rows."""
        slot = self._sequences.pop(owner).slot
        if self._owner[slot] == owner:
            self._owner[slot] = NOBODY
            self._recorded -= 1

    def _record(self, sequence: _Sequence) -> SequenceRecord:
        assert sequence.tokens is not None
        assert sequence.own is not None
        states = torch.cat([*sequence.prompt.parts, *sequence.own.parts])
        if len(states) != len(sequence.tokens) - 1:
            raise AssertionError(f"{len(states)} rows of {len(sequence.tokens)} tokens were recorded")
        return SequenceRecord(
            tokens=sequence.tokens,
            prompt_length=sequence.prompt_length,
            first=0,
            states=states.view(torch.uint8).numpy(),
            dtype=str(self._dtype).removeprefix("torch."),
            width=self._width,
            target_version=self._version,
            request_id=sequence.request_id,
        )


def _along_paths(
    paths: list[Int64Array | None], requests: list[int], request: Int64Array, column: Int64Array
) -> Int64Array:
    """Return the rows [n] inside their requests of accepted column [n] of request [n], counted over all steps."""
    trees = [path for path in paths if path is not None]
    if not trees:
        return column
    width = max(path.shape[1] for path in trees)
    stacked = np.concatenate([np.pad(path, ((0, 0), (0, width - path.shape[1]))) for path in trees])
    of_tree = np.repeat([path is not None for path in paths], requests)
    place = of_tree.cumsum() - 1  # [R of all steps], row in `stacked`
    inside = column.copy()
    tree = of_tree[request]
    inside[tree] = stacked[place[request[tree]], column[tree]]
    return inside
