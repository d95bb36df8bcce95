"""Norms, rotation with cache write, SwiGLU and the batch-invariant product in Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.ops import reference
from models.ops.triton import launch

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # one rounding of bfloat16, where float32 sums differ


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(0, 17), size=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_norms_and_swiglu(dtype: torch.dtype, rows: int, size: int, seed: int) -> None:
    x, residual = random(rows, size, dtype=dtype, seed=seed), random(rows, size, dtype=dtype, seed=seed + 1)
    weight = random(size, dtype=dtype, seed=seed + 2)
    assert_close(launch.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    normed, total = launch.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_close(normed, reference.rms_norm(total, weight, 1e-6))
    both = torch.cat((x, residual), 1)
    assert_close(launch.swiglu(both), reference.swiglu(both))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    x, residual, weight = (random(n, 896, dtype=dtype, seed=n) for n in (17, 17, 1))
    weight = weight[0]
    one = slice(11, 12)
    assert torch.equal(launch.rms_norm(x, weight, 1e-6)[one], launch.rms_norm(x[one], weight, 1e-6))
    for together, alone in zip(
        launch.add_rms_norm(x, residual, weight, 1e-6),
        launch.add_rms_norm(x[one], residual[one], weight, 1e-6),
        strict=True,
    ):
        assert torch.equal(together[one], alone)
    assert torch.equal(launch.swiglu(x)[one], launch.swiglu(x[one]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", [(14, 2, 64), (4, 2, 80), (8, 8, 96), (28, 4, 128), (3, 1, 2)])
def test_rotation_and_cache_write(heads: tuple[int, int, int], norm: bool, dtype: torch.dtype) -> None:
    query_heads, kv_heads, head_dim = heads
    rows, slots, positions = 4, torch.tensor([7, 1, 30, 2]), torch.tensor([3, 39, 0, 4])
    qkv = random(rows, (query_heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = torch.rand(40, head_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    q_norm, k_norm = (random(head_dim, dtype=dtype, seed=n) if norm else None for n in (2, 3))
    mine, theirs = ([torch.zeros(32, kv_heads, head_dim, dtype=dtype) for _ in range(2)] for _ in range(2))
    rotation = angles.cos(), angles.sin(), positions, slots, q_norm, k_norm, 1e-6
    q = launch.rope_write(qkv, *rotation, *mine)
    assert_close(q, reference.rope_write(qkv, *rotation, *theirs))
    assert_close(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])
    wider = torch.cat((qkv, qkv), 1)[:, : qkv.shape[1]]
    assert torch.equal(launch.rope_write(wider, *rotation, *mine), q), "rows may be apart"


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 80),
    columns=st.integers(1, 90),
    depth=st.integers(1, 200),
    bias=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_products(dtype: torch.dtype, rows: int, columns: int, depth: int, bias: bool, wide: bool, seed: int) -> None:
    x, weight = random(rows, depth, dtype=dtype, seed=seed), random(columns, depth, dtype=dtype, seed=seed + 1)
    added = random(columns, dtype=dtype, seed=seed + 2) if bias else None
    found = launch.linear(x, weight, added, wide)
    assert found.dtype is (torch.float32 if wide else dtype)
    expected = reference.linear(x, weight, added)
    tolerance = 2e-5 if found.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance * depth**0.5, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_products_row_is_the_same_in_any_batch_and_place(dtype: torch.dtype) -> None:
    x, weight = random(130, 200, dtype=dtype), random(70, 200, dtype=dtype, seed=1)
    together = launch.linear(x, weight, None, True)
    for part in (slice(0, 1), slice(64, 65), slice(100, 117), slice(3, 70)):
        assert torch.equal(launch.linear(x[part], weight, None, True), together[part])
