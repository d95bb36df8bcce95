"""Attention's work list: every split of every tile once, shared evenly, whatever the lengths."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.ops.triton.work import SPLIT_TOKENS, WorkList


def items_of(work: WorkList, numbers: Any) -> list[list[tuple[int, ...]]]:
    """(request, row of it, first split, splits) by program."""
    begins, items = numbers[: work.programs + 1], numbers[work.programs + 1 :].reshape(-1, 4).tolist()
    return [[tuple(item) for item in items[a:b]] for a, b in pairwise(begins)]


def expected_splits(counts: list[int], contexts: list[int], tile_rows: int, tree: bool) -> set[tuple[int, int, int]]:
    """(request, row, split) that some row of the tile may see, one by one."""
    found = set()
    for request, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        for inside in range(0, count, tile_rows):
            last_row = min(inside + tile_rows, count) - 1
            seen = context if tree else context - count + last_row + 1
            found |= {(request, inside, position // SPLIT_TOKENS) for position in range(seen)}
    return found


@settings(deadline=None, max_examples=150)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3000)), min_size=1, max_size=12),
    groups=st.sampled_from([(1, 1), (7, 1), (14, 2), (28, 4), (40, 8)]),
    programs=st.integers(1, 40),
    tree=st.booleans(),
    spare=st.integers(0, 3),
)
def test_every_split_is_walked_once_and_no_program_has_two_more_than_another(
    requests: list[tuple[int, int]], groups: tuple[int, int], programs: int, tree: bool, spare: int
) -> None:
    counts = [count for count, _ in requests]
    contexts = [count + before for count, before in requests]
    work = WorkList(WorkList.of(*groups, torch.bfloat16).tile_rows, programs)
    most = max(counts) + spare
    numbers = np.full(work.size(len(counts) + spare, sum(counts) + spare, most), -1, np.int32)
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    work.write(numbers, offsets, np.array(contexts, np.int32), tree=tree)
    shares = items_of(work, numbers)
    walked = [
        [(request, row, split) for request, row, first, many in share for split in range(first, first + many)]
        for share in shares
    ]
    everything = [one for share in walked for one in share]
    assert len(set(everything)) == len(everything)
    assert set(everything) == expected_splits(counts, contexts, work.tile_rows, tree)
    lengths = [len(share) for share in walked]
    assert max(lengths) - min(lengths) <= 1
    assert all(many > 0 for share in shares for *_, many in share)


def test_rows_of_nobody_are_no_work() -> None:
    work = WorkList(4, 5)
    numbers = np.full(work.size(3, 3, 1), 7, np.int32)
    work.write(numbers, np.zeros(1, np.int32), np.zeros(0, np.int32), tree=False)
    assert not any(items_of(work, numbers))


def test_one_long_context_among_many_short_ones_is_walked_by_many() -> None:
    """The case of B3: 7B, 96 requests, one at 8,192 tokens. Before, four programs had eight of its splits each."""
    work = WorkList.of(28, 4, torch.bfloat16)
    contexts = np.array([8192, *[600] * 95], np.int32)
    numbers = np.zeros(work.size(96, 96, 1), np.int32)
    work.write(numbers, np.arange(97, dtype=np.int32), contexts, tree=False)
    shares = items_of(work, numbers)
    assert sum(any(request == 0 for request, *_ in share) for share in shares) >= 9
    assert max(sum(many for *_, many in share) for share in shares) == -(-(32 + 95 * 3) // work.programs) == 4
