"""Assignment of waiting requests to rollout workers: a pure decision, no clock, no I/O.

Owns the rule, and the bookkeeping that it reads, which is updated incrementally. So the cost of a decision depends on
what it assigns, not on the number of open requests. It never moves a running request; between two turns an episode may
move (`go_on`).

The rule, in order of weight:
1. no worker idles while requests wait (a prompt's group is split for that, and only for that or for lack of slots);
2. longest expected first, because the makespan is decided by the responses that are started last;
3. a prompt's group stays on one worker, which prefills the prompt once: a worker takes the rest of a group that another
   worker holds only if nothing else waits.
Among workers, the one with the least expected work left gets the next group (Graham's LPT rule, 4/3 of the optimum).

Token counts must be multiples of 1/16 (`exact`), so that their sums do not depend on the order of events.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

# When a turn moves to an idle worker. Of 90 simulated cases none is slower than 0.98x by it; with 1 and 1.0 six are,
# because the idle worker's own episodes come back from their tools.
MOVE_RUNNING, MOVE_CONTEXT = 2, 0.5

_Rank = tuple[float, int]  # of a group: (minus the tokens of its longest request, prompt id); the smallest goes first


@dataclass(frozen=True, slots=True)
class Grant:
    """Assignment of waiting requests of a prompt, the longest first, to a worker."""

    worker: str
    prompt_id: int
    request_ids: tuple[int, ...]


@dataclass(slots=True)
class _SampleGroup:
    """The waiting requests of one prompt, and the workers that hold others of them."""

    waiting: list[tuple[float, int]] = field(default_factory=list)  # heap of (minus the tokens, request id)
    rank: _Rank = (0.0, 0)  # as of the end of the last decision
    holders: set[str] = field(default_factory=set)
    held: int = 0  # number of holders that are offered


@dataclass(slots=True, kw_only=True)
class _BalancedWorker:
    name: str
    slots: int = 0
    offered: bool = False
    running: int = 0
    load: float = 0.0  # remaining tokens of all running requests
    prompts: dict[int, int] = field(default_factory=dict)  # running requests by prompt
    own: list[_Rank] = field(default_factory=list)  # heap: groups of which it holds a part


def exact(tokens: float) -> float:
    """Round an expected number of tokens for the bookkeeping: a multiple of 1/16, at least 1, so that no request is
    free."""
    return max(round(tokens * 16) / 16, 1.0)


class Balance:
    """Waiting requests, running requests by worker, and their remaining tokens.

    The heaps of ranks are lazy. An entry is valid while it is its group's present rank and the heap's condition holds.
    Invalid entries are dropped when they reach the top. Whatever makes an entry valid pushes it.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _SampleGroup] = {}
        self._workers: dict[str, _BalancedWorker] = {}
        self._free: set[str] = set()  # offered workers with a free slot
        self._all: list[_Rank] = []  # heap: all waiting groups
        self._unheld: list[_Rank] = []  # heap: those of which no offered worker holds a part
        self._waiting_groups = 0
        self.waiting = 0  # requests
        self.waiting_tokens = 0.0  # of all waiting requests

    # Workers.

    def offer(self, worker: str, slots: int) -> None:
        """Declare that the worker can run `slots` requests at once from now on."""
        w = self._worker(worker)
        w.slots = slots
        if not w.offered:
            w.offered = True
            for prompt_id in w.prompts:
                self._groups[prompt_id].held += 1
        self._look(w)

    def withdraw(self, worker: str) -> None:
        """Assign nothing to the worker until it is offered again. It keeps what it runs."""
        w = self._worker(worker)
        if w.offered:
            w.offered = False
            for prompt_id in w.prompts:
                self._unhold(prompt_id)
        self._look(w)

    # Requests.

    def wait(self, prompt_id: int, request_id: int, tokens: float) -> None:
        """Add a request that no worker runs, with `tokens` still to be sampled."""
        group = self._groups.setdefault(prompt_id, _SampleGroup())
        self._waiting_groups += not group.waiting
        heappush(group.waiting, (-tokens, request_id))
        self.waiting += 1
        self.waiting_tokens += tokens
        self._rank(prompt_id, group)

    def forget(self, prompt_id: int, request_id: int) -> None:
        """Drop a waiting request."""
        group = self._groups[prompt_id]
        self.waiting_tokens += sum(less_tokens for less_tokens, known in group.waiting if known == request_id)
        group.waiting = [entry for entry in group.waiting if entry[1] != request_id]
        heapify(group.waiting)
        self.waiting -= 1
        self._waiting_groups -= not group.waiting
        self._rank(prompt_id, group)

    def holders(self, prompt_id: int) -> Collection[str]:
        """Return the workers that run requests of the prompt."""
        group = self._groups.get(prompt_id)
        return () if group is None else group.holders

    def progress(self, worker: str, tokens: float) -> None:
        """Subtract tokens from a running request of the worker."""
        self._workers[worker].load -= tokens

    def end(self, worker: str, prompt_id: int, tokens: float) -> None:
        """End a worker's request that had `tokens` left."""
        w = self._workers[worker]
        w.running -= 1
        w.load -= tokens
        w.prompts[prompt_id] -= 1
        if not w.prompts[prompt_id]:
            del w.prompts[prompt_id]
            group = self._groups[prompt_id]
            group.holders.discard(worker)
            if w.offered:
                self._unhold(prompt_id)
            if not group.waiting and not group.holders:
                del self._groups[prompt_id]
        self._look(w)

    def go_on(self, worker: str, prompt_id: int, tokens: float, context_tokens: int = 0) -> bool:
        """Run a request with `tokens` left on the worker that has K/V of its earlier turns, `context_tokens`.

        Returns false if the worker is not offered, or has no free slot while another has one. Also if it runs at least
        MOVE_RUNNING others while another worker has none, nothing waits, and the K/V to be computed anew are at most
        MOVE_CONTEXT of what is left: then the request moves."""
        w = self._worker(worker)
        if not w.offered or (w.running >= w.slots and self._free):
            return False
        if w.running >= MOVE_RUNNING and context_tokens <= MOVE_CONTEXT * tokens and not self.waiting and self._idle(w):
            return False
        group = self._groups.setdefault(prompt_id, _SampleGroup())
        self._hold(w, prompt_id, group, 1, tokens, group.rank)
        return True

    # The decision.

    def grants(self) -> list[Grant]:
        """Fill the free slots. Assigns min(free slots, waiting requests) requests, which then count as running. Groups
        keep the rank that they had at the begin."""
        if not self.waiting or not self._free:
            return []
        workers = [self._workers[name] for name in self._free]
        bins = [(w.running > 0, w.load, w.name) for w in workers]  # idle ones first, whatever the estimates: rule 1
        heapify(bins)
        idle = sum(w.running == 0 for w in workers)
        found: list[Grant] = []
        while bins and self.waiting:
            busy, load, name = bins[0]
            w = self._workers[name]
            rank = self._next(w)
            group = self._groups[rank[1]]
            count = min(w.slots - w.running, len(group.waiting))
            if not busy:
                if self._waiting_groups < idle:
                    count = min(count, -(-self.waiting // idle))  # the fair share, rounded up, leaves >= 1 for others
                idle -= 1
            found.append(self._grant(w, rank, group, count))
            if w.running < w.slots:
                heapreplace(bins, (True, load - count * rank[0], name))
            else:
                heappop(bins)
        for prompt_id in {grant.prompt_id for grant in found}:
            self._rank(prompt_id, self._groups[prompt_id])
        return found

    def _grant(self, w: _BalancedWorker, rank: _Rank, group: _SampleGroup, count: int) -> Grant:
        prompt_id = rank[1]
        taken = [heappop(group.waiting) for _ in range(count)]
        self.waiting -= count
        self._waiting_groups -= not group.waiting
        tokens = -sum(less_tokens for less_tokens, _ in taken)
        self.waiting_tokens -= tokens
        self._hold(w, prompt_id, group, count, tokens, rank)
        return Grant(w.name, prompt_id, tuple(request_id for _, request_id in taken))

    def _hold(
        self, w: _BalancedWorker, prompt_id: int, group: _SampleGroup, count: int, tokens: float, rank: _Rank
    ) -> None:
        """Record that the worker runs `count` more requests of the group, with `tokens` left."""
        w.running += count
        w.load += tokens
        w.prompts[prompt_id] = w.prompts.get(prompt_id, 0) + count
        if w.name not in group.holders:
            group.holders.add(w.name)
            group.held += 1
            heappush(w.own, rank)
        self._look(w)

    def _next(self, w: _BalancedWorker) -> _Rank:
        """The longest group that the worker holds a part of, or that no other holds; else the longest of all (rule 3).
        There is one."""
        unheld = self._first(self._unheld, "")
        own = self._first(w.own, w.name)
        found = min((rank for rank in (unheld, own) if rank is not None), default=None)
        found = self._first(self._all, None) if found is None else found
        assert found is not None
        return found

    def _first(self, heap: list[_Rank], holder: str | None) -> _Rank | None:
        """Of groups that this worker holds a part of; "": that nobody does; None: of all."""
        while heap:
            group = self._groups.get(heap[0][1])
            if group is not None and group.waiting and group.rank == heap[0] and _held_by(group, holder):
                return heap[0]
            heappop(heap)
        return None

    # Bookkeeping.

    def _idle(self, but: _BalancedWorker) -> bool:
        """Whether an offered worker other than this one runs nothing."""
        return any(not self._workers[name].running for name in self._free if name != but.name)

    def _worker(self, name: str) -> _BalancedWorker:
        return self._workers.setdefault(name, _BalancedWorker(name=name))

    def _look(self, w: _BalancedWorker) -> None:
        if w.offered and w.running < w.slots:
            self._free.add(w.name)
        else:
            self._free.discard(w.name)

    def _unhold(self, prompt_id: int) -> None:
        """Record that an offered worker no longer holds a part of the group, or is no longer offered."""
        group = self._groups[prompt_id]
        group.held -= 1
        if group.waiting and not group.held:
            heappush(self._unheld, group.rank)

    def _rank(self, prompt_id: int, group: _SampleGroup) -> None:
        """Update the rank after the group's waiting requests changed."""
        if not group.waiting:
            if not group.holders:
                del self._groups[prompt_id]
            return
        rank = (group.waiting[0][0], prompt_id)
        if rank == group.rank and len(group.waiting) > 1:
            return  # its heap entries are still valid
        group.rank = rank
        heappush(self._all, rank)
        if not group.held:
            heappush(self._unheld, rank)
        for name in group.holders:
            heappush(self._workers[name].own, rank)


def _held_by(group: _SampleGroup, holder: str | None) -> bool:
    if holder is None:
        return True
    return holder in group.holders if holder else not group.held
