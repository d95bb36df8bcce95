"""Paged attention in Triton's interpreter: equal to the oracle, and a row's bits its own."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.ops.triton import launch, work
from models.ops.triton.work import SPLIT_TOKENS
from tests.ops.triton.paged import Paged, paged
from tests.params import long

WIDEST = 40  # a prompt chunk among decoding requests


def assert_equals_the_oracle(case: Paged, found: Tensor) -> None:
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 2e-2}[case.q.dtype]
    torch.testing.assert_close(found, case.expected(), atol=tolerance, rtol=tolerance)


def assert_bitwise(found: Tensor, expected: Tensor) -> None:
    kind = {4: torch.int32, 2: torch.int16}[found.dtype.itemsize]
    assert torch.equal(found.view(kind), expected.view(kind))


@pytest.fixture(params=["splits", "whole"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Programs that each take a split, or that each go through the whole context."""
    if request.param == "whole":
        monkeypatch.setattr(launch, "_SPLIT_BYTES", 0)
    return str(request.param)


@settings(max_examples=12, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 300)), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 2, 16), (3, 3, 8), (7, 1, 20), (40, 1, 16)]),
    tree=st.booleans(),
    padding=st.integers(0, 40),
    whole=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_ragged_batch_equals_the_oracle(
    requests: list[tuple[int, int]], heads: tuple[int, int, int], tree: bool, padding: int, whole: bool, seed: int
) -> None:
    queries = [rows for rows, _ in requests]
    contexts = [rows + before for rows, before in requests]
    if not sum(contexts):
        return
    case = paged(queries, contexts, heads=heads, tree=8 * tree, padding=padding, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_SPLIT_BYTES", 0 if whole else 2**28)
        found = case.attend()
    assert_equals_the_oracle(case, found)
    assert not found[sum(queries) :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(14, 2, 64), (4, 2, 80), (8, 8, 96), (7, 1, 128)])
def test_head_shapes_of_shipped_families(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = paged([1, 5], [70, 33], heads=heads, dtype=dtype)
    assert_equals_the_oracle(case, case.attend())


@pytest.mark.parametrize("tree", [0, 17])
def test_one_to_seventeen_rows_of_a_request(tree: int, way: str) -> None:
    case = paged([1, 2, 3, 5, 8, 13, 16, 17], [1, 40, 257, 130, 8, 61, 300, 17], tree=tree)
    together = case.attend()
    assert_equals_the_oracle(case, together)
    for request in (0, 2, 6, 7):
        only, rows = case.alone(request)
        assert_bitwise(only.attend(), together[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_chunk_beside_decoding_requests(dtype: torch.dtype, way: str) -> None:
    case = paged([1, WIDEST, 1, 1], [300, 290, 9, 1], dtype=dtype)
    together = case.attend()
    assert_equals_the_oracle(case, together)
    for request in range(4):
        only, rows = case.alone(request)
        assert_bitwise(only.attend(), together[rows])


def test_a_prompt_cut_into_chunks_gives_the_same_bits(way: str) -> None:
    whole = paged([30], [290])
    expected = whole.attend()
    for cut in (1, 13):
        first = replace(
            whole,
            q=whole.q[:cut],
            offsets=torch.tensor([0, cut], dtype=torch.int32),
            contexts=torch.tensor([260 + cut], dtype=torch.int32),
        )
        rest = replace(whole, q=whole.q[cut:], offsets=torch.tensor([0, 30 - cut], dtype=torch.int32))
        assert_bitwise(torch.cat((first.attend(), rest.attend())), expected)


def test_a_chain_drawn_as_a_tree_gives_the_same_bits(way: str) -> None:
    chain = paged([5, 3], [260, 70])
    mask = torch.zeros(8, 6, dtype=torch.uint8)
    for start, rows in ((0, 5), (5, 3)):
        mask[start : start + rows, :rows] = torch.ones(rows, rows).tril()
    assert_bitwise(replace(chain, mask=mask).attend(), chain.attend())


@pytest.mark.parametrize("tree", [7, *long(0)])
def test_bounds_and_the_way_change_no_bit(tree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = paged([4, 1, 0, 7], [600, 257, 5, 300], tree=tree)
    expected = case.attend()
    assert_equals_the_oracle(case, expected)
    for max_query, max_context in ((7, 2048), (500, 700), (33, 32_768)):
        assert_bitwise(case.attend(max_query, max_context), expected)
    for name, value in (("_SPLIT_BYTES", 0), ("_LEAST_LANES", 1), ("_MOST_PROGRAMS", 1), ("_MOST_PROGRAMS", 99)):
        with monkeypatch.context() as patch:
            patch.setattr(launch, name, value)
            assert_bitwise(case.attend(), expected)
            assert_bitwise(case.attend(100, 900), expected)


@settings(max_examples=10, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 900)), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 2, 16), (7, 1, 20), (3, 3, 8)]),
    tree=st.sampled_from([0, 8, 70]),
    padding=st.integers(0, 9),
    programs=st.sampled_from([1, 4, 14]),
    seed=st.integers(0, 2**31),
)
def test_a_work_list_changes_no_bit(
    requests: list[tuple[int, int]], heads: tuple[int, int, int], tree: int, padding: int, programs: int, seed: int
) -> None:
    """Whoever walks a split: the list's programs, or those of its tile in turn."""
    queries = [rows for rows, _ in requests]
    contexts = [rows + before for rows, before in requests]
    if not sum(contexts):
        return
    case = paged(queries, contexts, heads=heads, tree=tree, padding=padding, seed=seed)
    bound = max(*contexts, 2 * SPLIT_TOKENS)  # more than one split: else nothing is listed
    expected = case.attend(max_context=bound)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "_PROGRAMS", programs)
        assert_bitwise(case.attend(max_context=bound, listed=True), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *long(torch.float32)])
def test_a_work_list_with_a_prompt_chunk_and_a_long_context(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "_PROGRAMS", 10)
    case = paged([1, WIDEST, 1, 0], [1500, 290, 9, 5], heads=(7, 1, 16), padding=3, dtype=dtype)
    found = case.attend(listed=True)
    assert_equals_the_oracle(case, found)
    assert_bitwise(found, case.attend())
    assert_bitwise(case.attend(100, 4096, listed=True), found)


def test_masks_wider_than_a_word(way: str) -> None:
    case = paged([70, 2], [90, 30], tree=71)
    assert_equals_the_oracle(case, case.attend())


def test_tables_of_any_strides() -> None:
    case = paged([1, 2], [40, 20])
    assert_bitwise(replace(case, tables=case.tables.t().contiguous().t()).attend(), case.attend())


@pytest.mark.long
def test_a_context_of_32k() -> None:
    case = paged([1], [32_768], heads=(2, 1, 16))
    assert_equals_the_oracle(case, case.attend())


@pytest.mark.pretended
@pytest.mark.parametrize("tree", [0, 17])
@pytest.mark.parametrize("heads", [(14, 2, 64), (28, 4, 128)])
def test_32k_of_context_with_real_heads(heads: tuple[int, int, int], tree: int, way: str) -> None:
    case = paged([1, 1, 17], [32_768, 33, 4097], heads=heads, tree=tree, dtype=torch.bfloat16)
    together = case.attend()
    assert_equals_the_oracle(case, together)
    only, rows = case.alone(2)
    assert_bitwise(only.attend(), together[rows])
