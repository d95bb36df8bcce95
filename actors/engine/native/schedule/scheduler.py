"""Scheduler: which requests run next. Owns the waiting queue, slots and KV blocks; never touches a tensor or a token's
value.

Admission: preempted requests first, then longest expected first, ties in order of arrival, while there is a slot and
there are blocks for every known token. Prompts are prefilled in chunks beside the decoding requests, at most
`prefill_chunk_tokens` rows per step. If a decoding request finds no free block, the youngest request is preempted: its
blocks are released, and it is recomputed later. So every request that fits the empty cache finishes; `intake` rejects
the rest.
"""

import heapq
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.plan import PromptEntry, PromptKey, SlotWatcher, StepPlan, Ticket
from actors.engine.batch.slots import SlotTable
from actors.engine.native.schedule.blocks import BlockPool
from actors.engine.native.schedule.prompts import PromptCache
from contracts.rollout import Request

Int64Array = NDArray[np.int64]
NO_SLOTS: Int64Array = np.zeros(0, np.int64)


class Scheduler:
    """Continuous batching over a SlotTable and a BlockPool."""

    def __init__(
        self,
        table: SlotTable,
        pool: BlockPool,
        block_tokens: int,
        prefill_chunk_tokens: int,
        watchers: Sequence[SlotWatcher] = (),
    ) -> None:
        self._watchers = watchers
        self._table, self._pool, self._block_tokens = table, pool, block_tokens
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._prompts = PromptCache(pool)
        self._tickets: dict[int, Ticket] = {}
        self._waiting: list[tuple[int, float, int, Ticket]] = []  # heap of (class, -expected tokens, order, ticket)
        self._running: dict[int, Ticket] = {}  # by slot, in order of admission
        self._free_slots = list(range(len(table.length) - 1, -1, -1))
        self._held: set[int] = set()  # slots that wait for their prompt's writer
        self._writers: dict[int, PromptKey] = {}  # slots that prefill a prompt for others
        self._turns: dict[int, PromptKey] = {}  # by noise key: the cached tokens of an episode's last turn here
        self._copies: list[tuple[int, int]] = []
        self._order = itertools.count()
        self._admissions = itertools.count()
        self._active: Int64Array | None = None  # running and not held; None: must be rebuilt
        self._lent = False  # some request may hold blocks for drafts
        self.preempted = 0

    @property
    def has_work(self) -> bool:
        return bool(self._tickets)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._tickets) - len(self._running)

    @property
    def kv_tokens_used(self) -> int:
        return (self._pool.total - self._pool.free) * self._block_tokens

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._tickets

    def ticket(self, request_id: int) -> Ticket:
        return self._tickets[request_id]

    def ticket_in(self, slot: int) -> Ticket:
        return self._running[slot]

    def add(self, ticket: Ticket) -> None:
        self._tickets[ticket.request.request_id] = ticket
        self._enqueue(ticket, first=False)

    def remove(self, request_id: int, *, finished: bool) -> None:
        """Remove a request (finished or aborted); its slot and blocks become free."""
        ticket = self._tickets.pop(request_id)
        if ticket.slot >= 0:
            self._vacate(ticket, finished=finished)

    def restart_unstarted(self) -> None:
        """After new weights: requeue requests without draws, which must not use K/V of the old ones."""
        table = self._table
        self._prompts_clear()
        for slot, ticket in list(self._running.items()):
            if table.length[slot] == ticket.known_tokens:
                self._requeue(ticket)

    def schedule(self, weights_version: int, now_s: float) -> StepPlan | None:
        """Return the next step, or None if there is nothing to do."""
        if self._lent and ((self._waiting and self._free_slots) or self._pool.free < len(self._running)):
            self._take_back_drafts()
        self._admit(weights_version, now_s)
        self._make_room()
        slots = self._active_slots()
        if not slots.size:
            return None
        table = self._table
        missing = table.length[slots] - table.computed[slots]
        rows, prefill_tokens = missing, 0
        if (missing > 1).any():
            rows = missing.copy()
            budget = self._prefill_chunk_tokens
            for i in np.flatnonzero(missing > 1):
                rows[i] = min(int(missing[i]), budget)
                budget -= int(rows[i])
            prefill_tokens = self._prefill_chunk_tokens - budget
            if budget == 0:
                slots, rows, missing = slots[rows > 0], rows[rows > 0], missing[rows > 0]
        copies, self._copies = self._copies, []
        return StepPlan(slots, rows, rows == missing, copies, prefill_tokens)

    def reserve_drafts(self, slots: Int64Array, counts: Int64Array) -> Int64Array:
        """Return `counts` cut to the free blocks: a draft never takes a block whose loss would preempt another
        request."""
        table, counts = self._table, counts.copy()
        blocks = -(-(table.length[slots] + counts) // self._block_tokens)
        for i in np.flatnonzero(blocks > table.block_counts[slots]):
            slot = int(slots[i])
            extra = min(int(blocks[i] - table.block_counts[slot]), self._pool.free)
            table.append_blocks(slot, self._pool.allocate(extra))
            self._lent = True
            counts[i] = min(counts[i], table.block_counts[slot] * self._block_tokens - table.length[slot])
        return counts

    def computed(self) -> None:
        """The step's rows are cached: start the requests that wait for completed prompts."""
        for slot in list(self._writers):
            entry = self._prompts.get(self._writers[slot])
            if entry is None or self._table.computed[slot] >= entry.reusable_tokens:
                del self._writers[slot]
                if entry is not None:
                    entry.ready = True
                    for waiting in entry.waiting_slots:
                        self._held.discard(waiting)
                        self._fork(waiting, entry)
                    entry.waiting_slots.clear()
                    self._active = None

    # Admission.

    def _enqueue(self, ticket: Ticket, *, first: bool) -> None:
        entry = (0 if first else 1, -ticket.request.expected_tokens, next(self._order), ticket)
        heapq.heappush(self._waiting, entry)

    def _admit(self, weights_version: int, now_s: float) -> None:
        while self._waiting and self._free_slots:
            ticket = self._waiting[0][-1]
            if self._tickets.get(ticket.request.request_id) is ticket and ticket.slot < 0:
                if not self._place(ticket):
                    return
                if ticket.weights_version < 0:
                    ticket.weights_version, ticket.started_s = weights_version, now_s
            heapq.heappop(self._waiting)

    def _place(self, ticket: Ticket) -> bool:
        """Give the ticket a slot and blocks for every known token; return False if it must wait."""
        total = self.blocks_for(ticket.known_tokens)
        # one spare block per running request, so that an admission does not cause the next preemption
        spare = len(self._running)
        entry = self._left_for(ticket) or self._prompts.get(ticket.key)
        if not self._free_up(total - self._shared(entry) + spare, keep=entry):
            if self._running:
                return False
            self._prompts_clear()
            entry = None
        slot = self._free_slots.pop()
        self._table.fill(slot, ticket.request, ticket.prefix, ticket.reported_tokens, ticket.limit)
        self._table.block_counts[slot] = 0
        shared = [] if entry is None else entry.blocks[: self._shared(entry)]
        self._pool.share(shared)
        self._table.append_blocks(slot, shared + self._pool.allocate(total - len(shared)))
        ticket.slot, ticket.admission = slot, next(self._admissions)
        ticket.reused_tokens = 0 if entry is None else entry.reusable_tokens
        self._running[slot] = ticket
        self._active = None
        reusable = len(ticket.request.prompt_tokens) - 1
        if entry is None:
            if reusable > 0:
                blocks = self._table.blocks(slot)[: self.blocks_for(reusable)]
                entry = PromptEntry(blocks=blocks, reusable_tokens=reusable, writer=ticket.request.request_id)
                self._prompts.add(ticket.key, entry)
                self._writers[slot] = ticket.key
        elif entry.ready:
            self._fork(slot, entry)
            if entry.handed_on:
                self._prompts.drop(self._turns.pop(ticket.request.noise_key))
        else:
            entry.waiting_slots.append(slot)
            self._held.add(slot)
        for watcher in self._watchers:
            watcher.begin(slot, entry)
        return True

    def _shared(self, entry: PromptEntry | None) -> int:
        """Return the number of the entry's blocks that a request uses unchanged."""
        if entry is None or entry.handed_on:
            return 0 if entry is None else len(entry.blocks)
        return entry.reusable_tokens // self._block_tokens

    def _left_for(self, ticket: Ticket) -> PromptEntry | None:
        """Return the cached tokens of the episode's turn before, if they still exist."""
        request = ticket.request
        key = self._turns.get(request.noise_key) if request.earlier_tokens else None
        if key is None or not request.prompt_tokens.tobytes().startswith(key[1]):
            return None
        return self._prompts.get(key)

    def _hand_on(self, request: Request, slot: int) -> None:
        """Keep the K/V of an ended turn for the next one."""
        computed = int(self._table.computed[slot])
        key = request.noise_key, self._table.tokens[slot, :computed].tobytes()  # of this episode only
        blocks = self._table.blocks(slot)[: self.blocks_for(computed)]
        left = PromptEntry(
            blocks=blocks, reusable_tokens=computed, writer=request.request_id, ready=True, handed_on=True
        )
        self._prompts.drop(key)
        self._prompts.add(key, left)
        self._turns[request.noise_key] = key

    def _fork(self, slot: int, entry: PromptEntry) -> None:
        """Start `slot` behind the entry's prompt tokens; the partial last block is copied."""
        self._table.computed[slot] = entry.reusable_tokens
        shared = self._shared(entry)
        if shared < len(entry.blocks):
            self._copies.append((entry.blocks[shared], int(self._table.block_tables[slot, shared])))

    # Blocks.

    def _free_up(self, blocks: int, keep: PromptEntry | None) -> bool:
        while self._pool.free < blocks:
            if not self._prompts.evict_one(keep):
                return False
        return True

    def _take_back_drafts(self) -> None:
        """Free the blocks that decoding requests hold for drafts."""
        table = self._table
        slots = np.fromiter(self._running, np.int64)
        slots = slots[table.computed[slots] == table.length[slots] - 1]
        needed = -(-table.computed[slots] // self._block_tokens)  # without the last token's, which `_make_room` adds
        for i in np.flatnonzero(table.block_counts[slots] > needed):
            slot, count = int(slots[i]), int(needed[i])
            self._pool.release(table.blocks(slot)[count:])
            table.block_counts[slot] = count
        self._lent = False

    def _make_room(self) -> None:
        """Ensure a block for every known token of every active request; preempt the youngest while there are none."""
        table = self._table
        while True:
            slots = self._active_slots()
            short = slots[table.length[slots] > table.block_counts[slots] * self._block_tokens]
            for slot in short:
                if not self._free_up(1, keep=None):
                    self._requeue(max(self._running.values(), key=lambda ticket: ticket.admission))
                    self.preempted += 1
                    break
                table.append_blocks(int(slot), self._pool.allocate(1))
            else:
                return

    def _prompts_clear(self) -> None:
        """Drop every cached prompt; requests that wait for one are requeued."""
        for slot in list(self._held):
            self._requeue(self._running[slot])
        self._writers.clear()
        self._turns.clear()
        self._prompts.clear()

    def _requeue(self, ticket: Ticket) -> None:
        """Preempt a running request; at its next admission it continues from its present tokens."""
        slot = ticket.slot
        drawn = int(self._table.length[slot] - self._table.prompt_length[slot])
        ticket.prefix = self._table.response(slot) if drawn else None
        ticket.reported_tokens = int(self._table.reported[slot] - self._table.prompt_length[slot])
        if self._table.length[slot] == ticket.submitted_tokens:
            ticket.weights_version = -1  # it drew nothing with those weights
        self._vacate(ticket, finished=False)
        self._enqueue(ticket, first=True)

    def _vacate(self, ticket: Ticket, *, finished: bool) -> None:
        slot, ticket.slot = ticket.slot, -1
        ticket.spared_steps += int(self._table.spared_steps[slot])
        for watcher in self._watchers:
            watcher.end(slot, finished)
        if finished and ticket.request.continues:
            self._hand_on(ticket.request, slot)
        del self._running[slot]
        self._active = None
        self._copies = [copy for copy in self._copies if copy[1] not in self._table.blocks(slot)]
        self._pool.release(self._table.blocks(slot))
        self._table.block_counts[slot] = 0
        self._free_slots.append(slot)
        if slot in self._held:
            self._held.discard(slot)
            entry = self._prompts.get(ticket.key)
            if entry is not None:
                entry.waiting_slots.remove(slot)
        key = self._writers.pop(slot, None)
        if key is not None:
            entry = self._prompts.drop(key)
            for waiting in list(entry.waiting_slots) if entry is not None else ():
                self._held.discard(waiting)
                self._requeue(self._running[waiting])

    def _active_slots(self) -> Int64Array:
        if self._active is None:
            active = [slot for slot in self._running if slot not in self._held]
            self._active = np.array(active, np.int64) if active else NO_SLOTS
        return self._active
