"""Attention of segments that continue others: bitwise that of whole sequences, gradients those of whole sequences."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import ops
from models.ops import Segments
from models.packed import PackedContext
from tests.native import needs_native

# Two trees: a trunk with branches, branches of branches, segments without rows, and a sequence that shares nothing.
LENGTHS = (5, 3, 2, 0, 4, 1, 6, 2, 7)
PARENTS = (-1, 0, 1, 1, 0, 4, 4, -1, 7)


def _paths(lengths: tuple[int, ...], parents: tuple[int, ...]) -> list[list[int]]:
    """Rows that each segment's last row sees."""
    paths: list[list[int]] = []
    start = 0
    for length, parent in zip(lengths, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), *range(start, start + length)])
        start += length
    return paths


def _attend(x: list[Tensor], lengths: tuple[int, ...], parents: tuple[int, ...] | None) -> Tensor:
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return ops.packed_attention(x[0], x[1], x[2], offsets, 0.3, segments=Segments(lengths, parents))


def _inputs(rows: int, heads: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, h, 16) for h in (heads[0], heads[1], heads[1])]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@st.composite
def trees(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and parents in depth-first order."""
    count = draw(st.integers(1, 12))
    lengths: list[int] = []
    parents: list[int] = []
    for segment in range(count):
        chain, last = [-1], segment - 1
        while last >= 0:
            chain.append(last)
            last = parents[last]
        parents.append(draw(st.sampled_from(chain)))
        lengths.append(draw(st.integers(0, 9)))
    assume(sum(lengths))
    return tuple(lengths), tuple(parents)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(tree=trees(), heads=st.sampled_from([(1, 1), (6, 2)]))
def test_a_row_is_bitwise_that_of_the_whole_sequence(
    dtype: torch.dtype, tree: tuple[tuple[int, ...], tuple[int, ...]], heads: tuple[int, int]
) -> None:
    lengths, parents = tree
    x = _inputs(sum(lengths), heads, dtype)
    shared = _attend(x, lengths, parents)
    for path in _paths(lengths, parents):
        alone = _attend([part[path] for part in x], (len(path),), None)
        assert torch.equal(shared[path], alone)


@needs_native
@settings(max_examples=40, deadline=None)
@given(tree=trees(), heads=st.sampled_from([(1, 1), (6, 2)]))
def test_gradients_are_those_of_whole_sequences(
    tree: tuple[tuple[int, ...], tuple[int, ...]], heads: tuple[int, int]
) -> None:
    lengths, parents = tree
    found = []
    for dtype in (torch.float32, torch.float64):  # the kernel, and torch over unrolled sequences
        x = [part.requires_grad_() for part in _inputs(sum(lengths), heads, dtype)]
        out = _attend(x, lengths, parents)
        found.append(torch.autograd.grad(out, x, _inputs(sum(lengths), heads, dtype, seed=1)[0]))
    for ours, oracle in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), oracle, rtol=2e-5, atol=2e-5)


def test_unrolled_in_float64_equals_every_row_alone() -> None:
    """The oracle above against sequences that share nothing."""
    grads = _inputs(sum(LENGTHS), (6, 2), torch.float64, seed=1)[0]
    x = [part.requires_grad_() for part in _inputs(sum(LENGTHS), (6, 2), torch.float64)]
    shared = torch.autograd.grad(_attend(x, LENGTHS, PARENTS), x, grads)
    total = [torch.zeros_like(part) for part in x]
    start = 0
    for length, path in zip(LENGTHS, _paths(LENGTHS, PARENTS), strict=True):
        own = slice(len(path) - length, len(path))
        out = _attend([part[path] for part in x], (len(path),), None)[own]
        for add, part in zip(total, torch.autograd.grad(out, x, grads[start : start + length]), strict=True):
            add += part
        start += length
    for ours, alone in zip(shared, total, strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-12, atol=1e-12)


@needs_native
def test_threads_change_no_gradient() -> None:
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            x = [part.requires_grad_() for part in _inputs(sum(LENGTHS), (6, 2), torch.float32)]
            found.append(torch.autograd.grad(_attend(x, LENGTHS, PARENTS).square().sum(), x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@needs_native
@pytest.mark.parametrize("parents", [(-1, 1), (-1, 2, 0), (-1, 0, -1, 1)])
def test_parents_out_of_order_are_refused(parents: tuple[int, ...]) -> None:
    lengths = (2,) * len(parents)
    with pytest.raises(ValueError, match="not in depth-first order"):
        _attend(_inputs(sum(lengths), (1, 1), torch.float32), lengths, parents)


def test_positions_go_on_where_the_parent_ends() -> None:
    context = PackedContext.from_lengths((3, 2, 1, 2), parents=(-1, 0, 1, 0))
    assert context.positions.tolist() == [0, 1, 2, 3, 4, 5, 3, 4]
