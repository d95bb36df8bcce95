"""RMS norm, SwiGLU, rope, split_qkv and write_kv against torch, forward and backward, and their invariances."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import ops
from models.ops import reference

pytestmark = pytest.mark.usefixtures("native")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def _randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def _angles(seed: int, rows: int, half: int) -> tuple[Tensor, Tensor]:
    angle = 10 * _randn(seed, rows, half)
    return angle.cos(), angle.sin()


def _same_gradients(
    function: Callable[..., Tensor], oracle: Callable[..., Tensor], inputs: list[Tensor], tolerance: float
) -> None:
    """Gradients of <function(inputs), w> for a random w against those of the oracle in float64."""
    mine = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    out, expected = function(*mine), oracle(*theirs)
    weight = _randn(99, *out.shape)
    (out.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 9), width=st.integers(1, 150), seed=st.integers(0, 2**31))
def test_rms_norm_equals_torch(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    x, weight = _randn(seed, rows, width, dtype=dtype), _randn(seed + 1, width, dtype=dtype)
    _close(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 9), width=st.integers(1, 150), seed=st.integers(0, 2**31))
def test_swiglu_equals_torch(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    x = 8 * _randn(seed, rows, 2 * width, dtype=dtype)
    _close(ops.swiglu(x), reference.swiglu(x))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 5), heads=st.integers(1, 5), half=st.integers(1, 64), seed=st.integers(0, 2**31))
def test_rope_is_bitwise_torchs(dtype: torch.dtype, rows: int, heads: int, half: int, seed: int) -> None:
    x = _randn(seed, rows, heads, 2 * half, dtype=dtype)
    cos, sin = _angles(seed, rows, half)
    assert torch.equal(ops.apply_rope(x, cos, sin), reference.apply_rope(x, cos, sin))


def test_extreme_values_pass_through() -> None:
    gate = torch.tensor([-1e4, -200.0, -89.0, -0.0, 0.0, 89.0, 200.0, 1e4, float("nan")])
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    torch.testing.assert_close(ops.swiglu(x), reference.swiglu(x), rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize(("width", "rows"), [(1, 3), (13, 200), (128, 5)])
def test_gradients_equal_float64_autograd(width: int, rows: int) -> None:
    x, weight = _randn(0, rows, width), _randn(1, width)

    def norm_oracle(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    def swiglu_oracle(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up

    _same_gradients(lambda x, w: ops.rms_norm(x, w, 1e-5), norm_oracle, [x, weight], 1e-5)
    _same_gradients(ops.swiglu, swiglu_oracle, [3 * _randn(2, rows, 2 * width)], 1e-5)

    cos, sin = _angles(3, rows, width)

    def rope_oracle(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    _same_gradients(lambda x: ops.apply_rope(x, cos, sin), rope_oracle, [_randn(4, rows, 3, 2 * width)], 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_operations_are_bitwise_the_separate_ones(dtype: torch.dtype) -> None:
    for rows, query_heads, kv_heads, head_dim in [(1, 4, 4, 16), (7, 6, 2, 20), (33, 8, 1, 128), (0, 2, 2, 8)]:
        qkv = _randn(rows, rows, (query_heads + 2 * kv_heads) * head_dim, dtype=dtype)
        q_norm, k_norm = _randn(1, head_dim, dtype=dtype), _randn(2, head_dim, dtype=dtype)
        cos, sin = _angles(5, rows, head_dim // 2)
        parts = qkv.view(rows, query_heads + 2 * kv_heads, head_dim)
        for with_norm in (False, True):
            norms = (q_norm, k_norm) if with_norm else (None, None)
            q, k, v = ops.split_qkv(qkv, cos, sin, query_heads, kv_heads, norms[0], norms[1], 1e-6)
            plain_q, plain_k = parts[:, :query_heads], parts[:, query_heads : query_heads + kv_heads]
            if with_norm:
                plain_q, plain_k = ops.rms_norm(plain_q, q_norm, 1e-6), ops.rms_norm(plain_k, k_norm, 1e-6)
            assert torch.equal(q, ops.apply_rope(plain_q, cos, sin))
            assert torch.equal(k, ops.apply_rope(plain_k, cos, sin))
            assert torch.equal(v, parts[:, query_heads + kv_heads :])
            graph = ops.split_qkv(
                qkv.clone().requires_grad_(), cos, sin, query_heads, kv_heads, norms[0], norms[1], 1e-6
            )
            assert all(torch.equal(a, b) for a, b in zip(graph, (q, k, v), strict=True))
        x, residual, weight = (
            _randn(7, rows, 67, dtype=dtype),
            _randn(8, rows, 67, dtype=dtype),
            _randn(9, 67).to(dtype),
        )
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, ops.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 64, 129])
def test_rows_and_elements_do_not_depend_on_their_place(dtype: torch.dtype, width: int) -> None:
    x, weight = _randn(0, 65, 2 * width, dtype=dtype), _randn(1, 2 * width, dtype=dtype)
    cos, sin = _angles(2, 65, width)
    norm, gate, rope = ops.rms_norm(x, weight, 1e-6), ops.swiglu(x), ops.apply_rope(x[:, None], cos, sin)
    for start, stop in [(0, 1), (3, 4), (5, 64), (64, 65)]:
        part = x[start:stop]
        assert torch.equal(ops.rms_norm(part, weight, 1e-6), norm[start:stop])
        assert torch.equal(ops.swiglu(part), gate[start:stop])
        assert torch.equal(ops.apply_rope(part[:, None], cos[start:stop], sin[start:stop]), rope[start:stop])
    # One value in every lane, tail included, gives one result.
    constant = torch.full((1, 2 * width), 0.7390851, dtype=dtype)
    assert ops.swiglu(constant).unique().numel() == 1
    assert ops.rms_norm(constant, torch.ones_like(constant[0]), 1e-6).unique().numel() == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_gradients_do_not_depend_on_the_threads(dtype: torch.dtype) -> None:
    rows, width = 333, 256  # large enough to be shared out, and not a whole number of blocks
    x, weight = _randn(0, rows, width, dtype=dtype), _randn(1, width, dtype=dtype)
    cos, sin = _angles(2, rows, width // 2)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        outs = ops.rms_norm(a, w, 1e-6), ops.swiglu(a), ops.apply_rope(a[:, None], cos, sin)
        torch.stack([out.float().square().sum() for out in outs]).sum().backward()
        results.append((*outs, a.grad, w.grad))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_writes_its_slots_and_nothing_else(dtype: torch.dtype) -> None:
    fused = _randn(0, 5, 4, 8, dtype=dtype)
    k, v = fused[:, :2], fused[:, 2:]  # strided rows, as in a fused projection
    k_cache, v_cache = torch.zeros(9, 2, 8, dtype=dtype), torch.ones(9, 2, 8, dtype=dtype)
    expected = k_cache.clone(), v_cache.clone()
    slots = torch.tensor([8, 0, 3, 5, 2])
    reference.write_kv(k, v, *expected, slots)
    ops.write_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])
    with pytest.raises(IndexError, match="row 1: slot 9"):
        ops.write_kv(k[:2], v[:2], k_cache, v_cache, torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="slots for"):
        ops.write_kv(k, v, k_cache, v_cache, slots[:2])


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="does not fit rows of 8"):
        ops.rms_norm(torch.ones(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match="cos and sin must be"):
        ops.apply_rope(torch.ones(2, 1, 8), torch.ones(2, 8), torch.ones(2, 8))
