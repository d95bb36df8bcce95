"""Which waiting requests go to which rollout worker: a pure decision, no clock, no I/O.

Owns the rule only; who waits and who runs is the dispatcher's ledger. It never moves a request that already runs.

The rule, in order of weight:
1. no worker idles while requests wait (a prompt's group is split for that, and only for that or for lack of slots);
2. longest expected first, because the makespan is decided by the responses that are started last;
3. a prompt's group stays on one worker, which prefills the prompt once: a worker takes leftovers of a group that
   another worker holds only if nothing else waits.
Among workers, the one with the least expected work left gets the next group (Graham's LPT rule, 4/3 of the optimum).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """The waiting requests of one prompt."""

    prompt_id: int
    count: int  # >= 1
    expected_tokens: float  # still to be sampled, per request (the longest of the group)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker that can take work holds now."""

    worker: int
    free_slots: int
    running: int
    expected_tokens: float  # still to be sampled, all running requests together
    prompts: Collection[int]  # prompt ids of the running requests


@dataclass(frozen=True, slots=True)
class Grant:
    """`count` waiting requests of a prompt go to a worker."""

    worker: int
    prompt_id: int
    count: int


@dataclass(slots=True)
class _Bin:
    worker: int
    free: int
    busy: bool
    load: float
    prompts: set[int]


def balance(waiting: Sequence[WaitingGroup], workers: Sequence[WorkerLoad]) -> list[Grant]:
    """Fill the free slots. Grants min(sum of free slots, sum of counts) requests; the order of both inputs is
    irrelevant: the answer depends on their contents only. O(groups * grants)."""
    queue = sorted(waiting, key=lambda g: (-g.expected_tokens, g.prompt_id))
    left = {g.prompt_id: g.count for g in queue if g.count > 0}
    if len(left) != len(queue):
        raise ValueError("waiting groups need distinct prompt ids and a count of at least 1")
    expected = {g.prompt_id: max(g.expected_tokens, 1.0) for g in queue}
    bins = [
        _Bin(w.worker, w.free_slots, w.running > 0, w.expected_tokens, set(w.prompts)) for w in workers if w.free_slots
    ]
    holders = {p for w in workers for p in w.prompts}
    grants: list[Grant] = []
    while bins and left:
        # Idle ones first, whatever the estimates say: rule 1.
        bin_ = min(bins, key=lambda b: (b.busy, b.load, b.worker))
        prompt = next((p for p in left if p in bin_.prompts or p not in holders), next(iter(left)))
        count = min(bin_.free, left[prompt])
        idle = sum(not b.busy for b in bins)
        if not bin_.busy and len(left) < idle:
            count = min(count, -(-sum(left.values()) // idle))  # the fair share, rounded up, leaves >= 1 for each other
        grants.append(Grant(bin_.worker, prompt, count))
        left[prompt] -= count
        if not left[prompt]:
            del left[prompt]
        holders.add(prompt)
        bin_.prompts.add(prompt)
        bin_.free -= count
        bin_.busy = True
        bin_.load += count * expected[prompt]
        if not bin_.free:
            bins.remove(bin_)
    return grants
