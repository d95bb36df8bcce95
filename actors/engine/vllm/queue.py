"""Admission to vLLM: longest expected request first, at most one per slot. Holds tickets and slots until they end.

vLLM gets at most as many requests as may run together; the others wait here, in the order of the native engine.
"""

import heapq
import itertools
from collections.abc import Sequence

from actors.engine.batch.plan import SlotWatcher, Ticket
from actors.engine.batch.slots import SlotTable


class AdmissionQueue:
    """Tickets by request id; `watchers` are notified of requests that take or leave a slot."""

    def __init__(self, table: SlotTable, watchers: Sequence[SlotWatcher]) -> None:
        self._table, self._watchers = table, watchers
        self._tickets: dict[int, Ticket] = {}
        self._waiting: list[tuple[float, int, Ticket]] = []  # heap of (-expected tokens, order, ticket)
        self._free = list(range(len(table.length) - 1, -1, -1))
        self._order = itertools.count()

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._tickets

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run."""
        return bool(self._tickets)

    def ticket(self, request_id: int) -> Ticket:
        return self._tickets[request_id]

    @property
    def running(self) -> int:
        """Number of requests in vLLM, running or not."""
        return len(self._table.length) - len(self._free)

    @property
    def waiting(self) -> int:
        return len(self._tickets) - self.running

    def add(self, ticket: Ticket) -> None:
        self._tickets[ticket.request.request_id] = ticket
        heapq.heappush(self._waiting, (-ticket.request.expected_tokens, next(self._order), ticket))

    def admit(self, weights_version: int, now_s: float) -> list[Ticket]:
        """Give slots to waiting requests and return their tickets, to be submitted to vLLM."""
        admitted = []
        while self._waiting and self._free:
            _, _, ticket = heapq.heappop(self._waiting)
            if self._tickets.get(ticket.request.request_id) is not ticket:  # aborted
                continue
            slot = ticket.slot = self._free.pop()
            self._table.fill(slot, ticket.request, ticket.prefix, ticket.reported_tokens, ticket.limit)
            ticket.weights_version, ticket.started_s = weights_version, now_s
            for watcher in self._watchers:
                watcher.begin(slot, None)
            admitted.append(ticket)
        return admitted

    def remove(self, request_id: int, *, finished: bool) -> None:
        """Remove a request; its slot, if it has one, becomes free."""
        ticket = self._tickets.pop(request_id)
        if ticket.slot < 0:
            return
        ticket.spared_steps += int(self._table.spared_steps[ticket.slot])
        for watcher in self._watchers:
            watcher.end(ticket.slot, finished)
        self._free.append(ticket.slot)
        ticket.slot = -1
