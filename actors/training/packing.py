"""Split one mini-batch into micro-batches for every rank: the plan and the flat arrays. Never calls the network.

Packed: sequences are concatenated without padding, in micro-batches of at most `budget_tokens`, balanced over ranks.
Padded (for comparison): sequences keep their order, each is padded to the longest of its micro-batch, and padding is
computed like any other token. Both have the same layout: a flat row of tokens with segment borders, where `rows` are
the positions whose hidden states predict response tokens.

Shared: a common prefix of packed sequences (a system prompt, the prompt of a group, the turns before a fork, the same
short answer) is laid out once. Segments then continue others (`ops.Segments`), and a sequence's tokens are not
contiguous.

The plan depends only on the tokens. It is the same on every rank, without communication.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

Bins = list[list[int]]  # [micro-batch] -> indices into the mini-batch
Plan = list[Bins]  # [rank]; all ranks have the same number
PAIRS_UP_TO = 1024  # sequences; filling by pairs is quadratic: about 10 ms for this many
MAX_EXCESS = 0.01  # tolerated excess work of the most loaded rank over the mean
PIECES_PER_RANK = 4  # bundles per rank, for even shares; with several ranks
BISECTIONS = 5  # the last one is finer than 2 % of the budget


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass of one rank. Input is prompt and response without its last token."""

    indices: tuple[int, ...]  # which sequences of the mini-batch, in this order; empty on a rank without work
    tokens: NDArray[np.int64]  # [T]
    lengths: tuple[int, ...]  # of the segments; their sum is T
    parents: tuple[int, ...] | None  # the segment that each continues, or -1; None: no parents
    places: tuple[NDArray[np.int64], ...]  # positions of each sequence's input in `tokens`
    rows: NDArray[np.int64]  # [R], positions in `tokens` whose hidden state predicts a drawn response token
    targets: NDArray[np.int64]  # [R], those response tokens
    response_lengths: NDArray[np.int64]  # drawn tokens of each sequence; `rows` is ordered by sequence


def input_tokens(prompt_tokens: int, response_tokens: int) -> int:
    """Return the number of network inputs: the last token predicts nothing."""
    return prompt_tokens + response_tokens - 1


def plan_packed(lengths: Sequence[int], *, budget_tokens: int, ranks: int) -> Plan:
    """Plan few micro-batches with nearly equal work for all ranks. O(n log n) beyond PAIRS_UP_TO sequences;
    deterministic.

    With a loose budget, longest first into the emptiest micro-batch (Graham 1969, longest processing time). If that
    needs more micro-batches than tokens / budget, best-fit decreasing (Johnson 1973: at most 11/9 of the optimum and
    one bin) or filling by pairs finds a small number that suffices. MULTIFIT (Coffman, Garey and Johnson 1978) evens
    out plans whose ranks differ by more than MAX_EXCESS. A sequence longer than the budget is a micro-batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rounds = max(1, -(-sum(min(length, budget_tokens) for length in lengths) // (budget_tokens * ranks)))
    spread = _spread(order, lengths, budget_tokens, rounds * ranks)
    if spread is None:
        bins = _best_fit(order, lengths, budget_tokens)
        if len(bins) > rounds * ranks and len(order) <= PAIRS_UP_TO:
            bins = min(bins, _fill_by_pairs(order, lengths, budget_tokens), key=len)
        rounds = -(-len(bins) // ranks)
        spread = _spread(order, lengths, budget_tokens, rounds * ranks)
    if ranks == 1:
        return [spread or bins]
    plan, excess = _deal(spread or bins, lengths, ranks)
    if excess > MAX_EXCESS and rounds > 1:
        evened = _even_out(spread or bins, order, lengths, budget_tokens, rounds * ranks)
        plan, _ = min((plan, excess), _deal(evened, lengths, ranks), key=itemgetter(1))
    return plan


def _spread(order: Sequence[int], lengths: Sequence[int], budget: int, count: int) -> Bins | None:
    """Put each sequence into the emptiest of `count` bins (the first of several); None if that exceeds the budget."""
    bins: Bins = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for i in order:
        load, b = heap[0]
        if load and load + lengths[i] > budget:
            return None
        bins[b].append(i)
        heapreplace(heap, (load + lengths[i], b))
    return bins


def _best_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> Bins:
    """Put each sequence into the fullest bin with room for it, else into a new one."""
    bins: Bins = []
    base = len(order) + 1
    rooms: list[int] = []  # room * base + bin, ascending: one integer to search for, and ties go to the older bin
    for i in order:
        length = lengths[i]
        at = bisect_left(rooms, length * base)
        if at == len(rooms):
            room, b = budget, len(bins)
            bins.append([])
        else:
            room, b = divmod(rooms.pop(at), base)
        bins[b].append(i)
        if room > length:
            insort(rooms, (room - length) * base + b)
    return bins


def _fill_by_pairs(order: Sequence[int], lengths: Sequence[int], budget: int) -> Bins:
    """Fill bin after bin: the longest remaining sequence, then the one or two that fill most of the room, until nothing
    fits.

    A depth-two search for minimum bin slack (Gupta and Ho 1999); O(n) for each filling.
    """
    left = [(lengths[i], -i) for i in reversed(order)]  # ascending; of equal ones the first is popped last
    bins: Bins = []
    while left:
        length, i = left.pop()
        chosen, room = [-i], budget - length
        while left and left[0][0] <= room:
            high = bisect_left(left, (room + 1, -len(lengths))) - 1
            best, pair = left[high][0], [high]
            low = 0
            while low < high and best < room:
                both = left[low][0] + left[high][0]
                if both > room:
                    high -= 1
                    continue
                if both > best:
                    best, pair = both, [high, low]
                low += 1
            chosen += [-left.pop(at)[1] for at in pair]
            room -= best
        bins.append(chosen)
    return bins


def _even_out(bins: Bins, order: Sequence[int], lengths: Sequence[int], budget: int, count: int) -> Bins:
    """Pack below the lowest budget that fits `count` bins, found by a few bisections; return `bins` if there is
    none."""
    low, high = sum(min(length, budget) for length in lengths) // count, budget
    for _ in range(BISECTIONS):
        middle = (low + high) // 2
        tried = _best_fit(order, lengths, middle)
        if len(tried) <= count:
            bins, high = tried, middle
        else:
            low = middle + 1
    return bins


def _deal(bins: Bins, lengths: Sequence[int], ranks: int) -> tuple[Plan, float]:
    """Distribute bins in rounds of equal weight, as ranks wait for each other; each round gives the heaviest to the
    rank with least work.

    Returns the plan, and the excess of the most loaded rank over the mean, as a fraction of the mean.
    """
    loads = [sum(lengths[i] for i in b) for b in bins] + [0] * (-len(bins) % ranks)
    heavy = sorted(range(len(loads)), key=lambda b: (-loads[b], b))
    plan: Plan = [[] for _ in range(ranks)]
    work = [0] * ranks
    for first in range(0, len(heavy), ranks):
        for rank, b in zip(sorted(range(ranks), key=work.__getitem__), heavy[first : first + ranks], strict=True):
            plan[rank].append(bins[b] if b < len(bins) else [])
            work[rank] += loads[b]
    return plan, max(work) * ranks / sum(work) - 1.0


def plan_padded(lengths: Sequence[int], *, budget_tokens: int, ranks: int) -> Plan:
    """Fill micro-batches in the given order, with as many sequences as fit when padded to the longest of them."""
    bins: list[list[int]] = []
    longest = 0
    for i, length in enumerate(lengths):
        longest = max(longest, length)
        if not bins or (len(bins[-1]) + 1) * longest > budget_tokens:
            bins.append([])
            longest = length
        bins[-1].append(i)
    bins += [[] for _ in range(-len(bins) % ranks)]
    return [bins[rank::ranks] for rank in range(ranks)]


def bundles_of(
    prompts: Sequence[NDArray[np.int32]], responses: Sequence[NDArray[np.int32]], *, budget_tokens: int, ranks: int
) -> tuple[Bins, list[int]]:
    """Bundle sequences into trees, as items of a plan of shared micro-batches. Returns the bundles and their tokens,
    with every common prefix counted once.

    A tree has the sequences of a prompt, and those whose prompt continues it: turns, and what forks from them. It is
    cut where that repeats the fewest tokens, to fit the budget, and for several ranks into pieces of even shares."""
    inputs = [np.concatenate((p, r[:-1])) for p, r in zip(prompts, responses, strict=True)]
    order = depth_first(inputs)
    shared = [0, *(common_prefix(inputs[a], inputs[b]) for a, b in pairwise(order))]
    trees: list[slice] = []
    for at, i in enumerate(order):
        if at and shared[at] >= min(len(prompts[order[at - 1]]), len(prompts[i])):
            trees[-1] = slice(trees[-1].start, at + 1)
        else:
            trees.append(slice(at, at + 1))
    fresh = np.array([len(inputs[i]) for i in order], np.int64) - shared
    heads = np.array([tree.start for tree in trees])
    total = int(fresh.sum()) + sum(shared[head] for head in heads)
    most = budget_tokens if ranks == 1 else min(budget_tokens, total // (ranks * PIECES_PER_RANK))
    cut = [piece for tree in trees for piece in _cut(fresh[tree], np.array(shared[tree]), tree.start, most)]
    found = [(sorted(order[begin:end]), tokens) for begin, end, tokens in cut]
    found.sort(key=lambda bundle: bundle[0][0])
    return [bundle for bundle, _ in found], [tokens for _, tokens in found]


def _cut(fresh: NDArray[np.int64], shared: NDArray[np.int64], start: int, most: int) -> list[tuple[int, int, int]]:
    """Cut a tree of n sequences in depth-first order into runs of at most `most` tokens (or one sequence): the fewest
    tokens, then the fewest runs. fresh, shared: tokens of each that the one before has not, and has. Returns (begin,
    end, tokens) of the runs, numbered from `start`. O(n) operations on arrays of at most n."""
    sums = np.concatenate(([0], np.cumsum(fresh)))
    whole = int(sums[-1] + shared[0])
    if whole <= most:
        return [(start, start + len(fresh), whole)]
    best = np.zeros(len(sums), np.int64)  # of what comes before: tokens, and a run counts as a fraction of one
    come_from = np.zeros(len(sums), np.int64)
    scale = len(sums)
    for end in range(1, len(sums)):
        tokens = sums[end] - sums[:end] + shared[:end]
        fits = tokens <= most
        fits[-1] = True
        costs = np.where(fits, best[:end] + tokens * scale + 1, np.iinfo(np.int64).max)
        come_from[end] = int(costs.argmin())
        best[end] = costs[come_from[end]]
    runs, end = list[tuple[int, int, int]](), len(fresh)
    while end:
        begin = int(come_from[end])
        runs.append((start + begin, start + end, int(sums[end] - sums[begin] + shared[begin])))
        end = begin
    return runs[::-1]


def build_micro_batch(
    indices: Sequence[int],
    prompts: Sequence[NDArray[np.int32]],
    responses: Sequence[NDArray[np.int32]],
    drawn: Sequence[NDArray[np.bool_] | None] | None = None,
    *,
    padded: bool = False,
    shared: bool = False,
) -> MicroBatch:
    """Lay the chosen sequences end to end, `padded` or `shared` if requested. `prompts`, `responses` and the mask of
    their `drawn` tokens (None: all) are those of the whole mini-batch.

    Without indices the result is one token that predicts nothing: a rank without work still takes part in the
    collectives of the sharded model.
    """
    if not indices:
        empty = np.zeros(0, np.int64)
        return MicroBatch(
            tokens=np.zeros(1, np.int64),
            indices=(),
            lengths=(1,),
            parents=None,
            places=(),
            rows=empty,
            targets=empty,
            response_lengths=empty,
        )
    inputs = [np.concatenate((prompts[i], responses[i][:-1])) for i in indices]
    parents = None
    if shared:
        tokens, lengths, parents, places = lay_out_shared(inputs)
    else:
        used = [len(tokens) for tokens in inputs]
        lengths = [max(used)] * len(used) if padded else used
        starts = np.cumsum(lengths) - lengths
        places = [np.arange(start, start + length) for start, length in zip(starts, used, strict=True)]
        tokens = np.zeros(sum(lengths), np.int64)
        tokens[np.concatenate(places)] = np.concatenate(inputs)
    rows, targets, counts = [], [], []
    for i, place in zip(indices, places, strict=True):
        mask = None if drawn is None else drawn[i]
        kept = slice(None) if mask is None else mask
        rows.append(place[len(prompts[i]) - 1 :][kept])
        targets.append(responses[i][kept])
        counts.append(len(rows[-1]))
    return MicroBatch(
        indices=tuple(indices),
        tokens=tokens,
        lengths=tuple(lengths),
        parents=parents,
        places=tuple(places),
        rows=np.concatenate(rows),
        targets=np.concatenate(targets).astype(np.int64),
        response_lengths=np.array(counts, np.int64),
    )


def lay_out_shared(
    inputs: Sequence[NDArray[np.int32]],
) -> tuple[NDArray[np.int64], list[int], tuple[int, ...], list[NDArray[np.int64]]]:
    """Lay out the sequences as a radix tree in depth-first order.

    Returns its tokens [T]; for each edge, which is a segment, length and parent; for each sequence the positions of its
    tokens. Time: sorting, and one pass over the tokens."""
    places = [np.zeros(0, np.int64)] * len(inputs)
    fresh: list[NDArray[np.int32]] = []
    parent_of = dict[int, int]()  # first row of a segment -> the row before it
    rows, before, path = 0, np.zeros(0, np.int32), np.zeros(0, np.int64)
    for i in depth_first(inputs):
        common = common_prefix(before, inputs[i])
        fresh.append(inputs[i][common:])
        path = np.concatenate((path[:common], np.arange(rows, rows + len(fresh[-1]))))
        if len(fresh[-1]):
            parent = int(path[common - 1]) if common else -1
            parent_of[rows] = parent
            if common:
                parent_of.setdefault(parent + 1, parent)  # the branch splits the segment that was whole so far
        rows, before, places[i] = rows + len(fresh[-1]), inputs[i], path
    starts = np.array(sorted(parent_of), np.int64)
    parents = np.searchsorted(starts, [parent_of[start] for start in starts.tolist()], side="right") - 1
    lengths = np.diff(np.append(starts, rows))
    return np.concatenate(fresh).astype(np.int64), lengths.tolist(), tuple(parents.tolist()), places


def depth_first(inputs: Sequence[NDArray[np.int32]]) -> list[int]:
    """Return the indices in the order of a walk through the radix tree of the sequences."""
    return sorted(range(len(inputs)), key=lambda i: inputs[i].astype(">i4").tobytes())


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Return the number of common first tokens."""
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    return int(differ.argmax()) if differ.any() else shorter
