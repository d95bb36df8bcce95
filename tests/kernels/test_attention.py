"""Attention against a float64 oracle, its gradients, and the equalities that the engine and the learner rely on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import ops
from models.ops import reference

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}  # scores reach 15, and rounding grows with them

segments = st.lists(st.integers(0, 40), min_size=1, max_size=6)
heads = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (5, 1)])
head_dims = st.sampled_from([16, 24, 32, 64, 80, 128])


def _case(lengths: list[int], query_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
    rows = sum(lengths)
    return [torch.randn(rows, h, head_dim, generator=generator).to(dtype) for h in (query_heads, kv_heads, kv_heads)]


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _oracle(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """One segment and one row at a time, in float64."""
    group = q.shape[1] // k.shape[1]
    out, start = [], 0
    for length in lengths:
        qs, ks, vs = (x[start : start + length].double() for x in (q, k, v))
        ks, vs = ks.repeat_interleave(group, 1), vs.repeat_interleave(group, 1)
        for row in range(length):
            weights = torch.einsum("hd,jhd->hj", qs[row] * scale, ks[: row + 1]).softmax(-1)
            out.append(torch.einsum("hj,jhd->hd", weights, vs[: row + 1]))
        start += length
    return torch.stack(out) if out else q.double()


class Cache:
    """A paged cache whose blocks lie in random order among slots of NaN, with the given segments written to it."""

    def __init__(self, k: Tensor, v: Tensor, lengths: list[int], block_tokens: int, seed: int = 0) -> None:
        blocks = [-(-length // block_tokens) for length in lengths]
        order = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(seed))
        self.block_tokens = block_tokens
        self.tables = torch.full((len(lengths), max(1, *blocks) + 1), 2**30, dtype=torch.int32)
        self.k = torch.full((len(order) * block_tokens, *k.shape[1:]), float("nan"), dtype=k.dtype)
        self.v = self.k.clone()
        used = row = 0
        for i, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
            self.tables[i, :count] = order[used : used + count]
            place = torch.arange(length)
            slots = self.tables[i, place // block_tokens].long() * block_tokens + place % block_tokens
            ops.write_kv(k[row : row + length], v[row : row + length], self.k, self.v, slots)
            used, row = used + count, row + length

    def attend(self, q: Tensor, query_lens: list[int], context: list[int], scale: float, **kwargs: Tensor) -> Tensor:
        context_lens = torch.tensor(context, dtype=torch.int32)
        arguments = (self.tables, _offsets(query_lens), context_lens, self.block_tokens, scale)
        return ops.paged_attention(q, self.k, self.v, *arguments, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(lengths=segments, heads=heads, head_dim=head_dims)
def test_packed_equals_the_oracle(
    dtype: torch.dtype, lengths: list[int], heads: tuple[int, int], head_dim: int
) -> None:
    q, k, v = _case(lengths, *heads, head_dim, dtype)
    scale = head_dim**-0.5
    expected = _oracle(q, k, v, lengths, scale)
    for attention in (ops.packed_attention, reference.packed_attention):
        out = attention(q, k, v, _offsets(lengths), scale)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=30, deadline=None)
@given(lengths=segments, heads=heads, head_dim=st.sampled_from([16, 40, 64]))
def test_packed_gradients_equal_the_oracles(lengths: list[int], heads: tuple[int, int], head_dim: int) -> None:
    inputs = _case(lengths, *heads, head_dim, torch.float32)
    mine, theirs = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
    scale = 1.3 * head_dim**-0.5
    out = ops.packed_attention(mine[0], mine[1], mine[2], _offsets(lengths), scale)
    expected = _oracle(theirs[0], theirs[1], theirs[2], lengths, scale)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        if b.grad is not None:  # None where there are no rows
            torch.testing.assert_close(a.grad, b.grad, rtol=2e-5, atol=2e-5)


def test_bf16_gradients_are_near_the_oracles() -> None:
    lengths = [3, 17, 1, 40]
    mine = [x.requires_grad_() for x in _case(lengths, 4, 2, 32, torch.bfloat16)]
    theirs = [x.detach().double().requires_grad_() for x in mine]
    ops.packed_attention(mine[0], mine[1], mine[2], _offsets(lengths), 0.2).float().square().sum().backward()
    _oracle(theirs[0], theirs[1], theirs[2], lengths, 0.2).square().sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.dtype == torch.bfloat16
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=3e-2, atol=3e-2 * float(b.grad.abs().max()))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None)
@given(
    lengths=segments,
    heads=heads,
    head_dim=head_dims,
    block_tokens=st.sampled_from([1, 3, 16, 64]),
    data=st.data(),
)
def test_paged_is_bitwise_packed_for_any_chunk(
    dtype: torch.dtype,
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_tokens: int,
    data: st.DataObject,
) -> None:
    """Any mixture of decode rows, prefill chunks and verifications at any place of the sequences."""
    q, k, v = _case(lengths, *heads, head_dim, dtype)
    packed = ops.packed_attention(q, k, v, _offsets(lengths), 0.3)
    cache = Cache(k, v, lengths, block_tokens)
    context = [data.draw(st.integers(0, length)) for length in lengths]
    queries = [data.draw(st.integers(0, length)) for length in context]
    rows = [
        start + position
        for start, length, count in zip(_offsets(lengths).tolist(), context, queries, strict=False)
        for position in range(length - count, length)
    ]
    out = cache.attend(q[rows], queries, context, 0.3)
    assert torch.equal(out, packed[rows])
    torch.testing.assert_close(
        reference.paged_attention(
            q[rows], cache.k, cache.v, cache.tables, _offsets(queries), torch.tensor(context), block_tokens, 0.3
        ),
        out,
        rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype],
    )


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_segment_does_not_depend_on_its_batch_or_the_threads(dtype: torch.dtype, threads: int) -> None:
    lengths = [70, 1, 0, 33, 5, 128]
    inputs = _case(lengths, 6, 2, 32, dtype)
    offsets = _offsets(lengths).tolist()
    alone = []
    for start, length in zip(offsets, lengths, strict=False):
        mine = [x[start : start + length].clone().requires_grad_() for x in inputs]
        out = ops.packed_attention(mine[0], mine[1], mine[2], _offsets([length]), 0.2)
        out.sum().backward()
        alone.append((out, *(x.grad for x in mine)))
    torch.set_num_threads(threads)
    mine = [x.clone().requires_grad_() for x in inputs]
    out = ops.packed_attention(mine[0], mine[1], mine[2], _offsets(lengths), 0.2)
    out.sum().backward()
    for whole, parts in zip((out, *(x.grad for x in mine)), zip(*alone, strict=True), strict=True):
        assert whole is not None
        assert torch.equal(whole, torch.cat(parts))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_path_of_a_tree_is_bitwise_a_plain_continuation(dtype: torch.dtype) -> None:
    """A context of 21 tokens and the tree 0 -> (1 -> 3, 2): every node equals the last row of its own path."""
    before, paths = 21, {0: [0], 1: [0, 1], 2: [0, 2], 3: [0, 1, 3]}
    q, k, v = _case([before + 4], 4, 2, 32, dtype)
    cache = Cache(k, v, [before + 4], 16)
    mask = torch.zeros(4, 6, dtype=torch.bool)
    for node, path in paths.items():
        mask[node, path] = True
    tree = cache.attend(q[before:], [4], [before + 4], 0.25, tree_mask=mask)
    for node, path in paths.items():
        rows = [*range(before), *(before + i for i in path)]
        plain = ops.packed_attention(q[rows], k[rows], v[rows], _offsets([len(rows)]), 0.25)
        assert torch.equal(tree[node], plain[-1])
    arguments = (cache.tables, _offsets([4]), torch.tensor([before + 4]), 16, 0.25)
    oracle = reference.paged_attention(q[before:], cache.k, cache.v, *arguments, tree_mask=mask)
    torch.testing.assert_close(tree, oracle, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("scale", [50.0, 1e4])
def test_peaked_scores_stay_finite(scale: float) -> None:
    q, k, v = _case([30], 2, 1, 16, torch.float32)
    out = ops.packed_attention(q, k, v, _offsets([30]), scale)
    torch.testing.assert_close(out.double(), _oracle(q, k, v, [30], scale), rtol=2e-3, atol=2e-3)


@pytest.mark.usefixtures("native")
def test_reads_outside_the_cache_are_errors() -> None:
    q, k, v = _case([8], 2, 1, 16, torch.float32)
    cache = Cache(k, v, [8], 4)
    with pytest.raises(IndexError, match="lies outside the KV cache"):
        cache.attend(q[:1], [1], [9], 1.0)
    with pytest.raises(ValueError, match="exceeds its block table"):
        cache.attend(q[:1], [1], [13], 1.0)
    with pytest.raises(ValueError, match="a context of 1 tokens"):
        cache.attend(q[:2], [2], [1], 1.0)
    with pytest.raises(ValueError, match="tree_mask has columns"):
        cache.attend(q[:3], [3], [8], 1.0, tree_mask=torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="cu_seqlens must start at 0"):
        ops.packed_attention(q, k, v, _offsets([7]), 1.0)
    with pytest.raises(ValueError, match="do not fit together"):
        ops.packed_attention(q, k[..., :8], v, _offsets([8]), 1.0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    before=st.integers(0, 120),
    heads=st.sampled_from([(9, 3), (8, 2), (3, 3), (7, 1)]),
    head_dim=st.sampled_from([24, 64]),
    dtype=st.sampled_from(DTYPES),
    tree=st.booleans(),
)
def test_a_row_does_not_see_what_its_neighbours_see(
    rows: list[int], before: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, tree: bool
) -> None:
    """Rows of a request read their keys together, up to the first one's end. The keys behind it belong to some of them
    only: bits are those of the row alone, and a NaN in the last key reaches the last row only."""
    lengths = [before + count for count in rows]
    q, k, v = _case(lengths, *heads, head_dim, dtype)
    ends = torch.tensor(lengths).cumsum(0)
    places = torch.cat([torch.arange(end - count, end) for end, count in zip(ends.tolist(), rows, strict=True)])
    last = (ends - 1).tolist()
    k[last], v[last] = float("nan"), float("nan")
    cache = Cache(k, v, lengths, 16)
    scale, context = head_dim**-0.5, torch.tensor(lengths, dtype=torch.int32)
    width = max(rows)
    mask = torch.cat([torch.ones(count, width).tril() for count in rows]) if tree else None
    together = ops.paged_attention(
        q[places], cache.k, cache.v, cache.tables, _offsets(rows), context, 16, scale, tree_mask=mask
    )
    start = 0
    for request, count in enumerate(rows):
        for row in range(count):
            one = ops.paged_attention(
                q[places[start + row : start + row + 1]],
                cache.k,
                cache.v,
                cache.tables[request : request + 1],
                _offsets([1]),
                context[request : request + 1] - (count - 1 - row),
                16,
                scale,
            )
            assert torch.equal(together[start + row : start + row + 1].nan_to_num(7.0), one.nan_to_num(7.0))
            assert bool(one.isnan().any()) == (row + 1 == count)
        start += count
