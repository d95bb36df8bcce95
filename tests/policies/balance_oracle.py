"""The rule of policies.balance by its definition: every decision looks at every open request. Slow and obvious."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Open:
    """An open request."""

    request_id: int
    prompt_id: int
    tokens: float  # still to be sampled
    holder: str | None  # None: it waits


@dataclass(frozen=True)
class WaitingGroup:
    prompt_id: int
    count: int  # >= 1
    tokens: float  # still to be sampled, of the longest


@dataclass(frozen=True)
class WorkerLoad:
    worker: str
    free_slots: int
    running: int
    tokens: float  # still to be sampled, all running requests together
    prompts: Collection[int]


@dataclass
class _Bin:
    worker: str
    free: int
    busy: bool
    load: float
    prompts: set[int]


def grants(requests: Iterable[Open], slots: Mapping[str, int]) -> list[tuple[str, int, tuple[int, ...]]]:
    """(worker, prompt, requests) of a decision; `slots` of the workers that are offered."""
    groups: dict[int, list[Open]] = {}
    held: dict[str, list[Open]] = {worker: [] for worker in slots}
    for request in requests:
        if request.holder is None:
            groups.setdefault(request.prompt_id, []).append(request)
        elif request.holder in held:
            held[request.holder].append(request)
    for group in groups.values():
        group.sort(key=lambda r: (-r.tokens, r.request_id))
    decided = balance(
        [WaitingGroup(p, len(g), g[0].tokens) for p, g in groups.items()],
        [
            WorkerLoad(w, max(slots[w] - len(rs), 0), len(rs), sum(r.tokens for r in rs), {r.prompt_id for r in rs})
            for w, rs in held.items()
        ],
    )
    found = []
    for worker, prompt, count in decided:
        group = groups[prompt]
        found.append((worker, prompt, tuple(r.request_id for r in group[:count])))
        del group[:count]
    return found


def balance(waiting: Sequence[WaitingGroup], workers: Sequence[WorkerLoad]) -> list[tuple[str, int, int]]:
    """(worker, prompt, count), in the order of the decisions."""
    queue = sorted(waiting, key=lambda g: (-g.tokens, g.prompt_id))
    left = {g.prompt_id: g.count for g in queue}
    tokens = {g.prompt_id: g.tokens for g in queue}
    bins = [_Bin(w.worker, w.free_slots, w.running > 0, w.tokens, set(w.prompts)) for w in workers if w.free_slots]
    holders = {p for w in workers for p in w.prompts}
    found = []
    while bins and left:
        bin_ = min(bins, key=lambda b: (b.busy, b.load, b.worker))
        prompt = next((p for p in left if p in bin_.prompts or p not in holders), next(iter(left)))
        count = min(bin_.free, left[prompt])
        idle = sum(not b.busy for b in bins)
        if not bin_.busy and len(left) < idle:
            count = min(count, -(-sum(left.values()) // idle))
        found.append((bin_.worker, prompt, count))
        left[prompt] -= count
        if not left[prompt]:
            del left[prompt]
        holders.add(prompt)
        bin_.prompts.add(prompt)
        bin_.free -= count
        bin_.busy = True
        bin_.load += count * tokens[prompt]
        if not bin_.free:
            bins.remove(bin_)
    return found
