"""The linear operation: against float64, its gradients, bitwise batch invariance, and packed weights."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import ops
from models.ops import matmul

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(128, 256), (384, 128), (128, 228), (96, 100), (45, 7)]  # K, N


def _case(seed: int, rows: int, depth: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, depth, generator=generator), torch.randn(columns, depth, generator=generator)
    return x.to(dtype), weight.to(dtype), torch.randn(columns, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("invariant", [True, False])
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40),
    depth=st.integers(1, 70),
    columns=st.integers(1, 140),
    with_bias=st.booleans(),
    packed=st.booleans(),
)
def test_equals_float64(
    dtype: torch.dtype, invariant: bool, rows: int, depth: int, columns: int, with_bias: bool, packed: bool
) -> None:
    x, weight, bias = _case(rows * depth + columns, rows, depth, columns, dtype)
    if packed:
        ops.prepack(weight)
    out = ops.linear(x, weight, bias if with_bias else None, invariant=invariant)
    expected = F.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    assert out.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * depth**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("depth", "columns"), [*SHAPES, (1536, 512)])
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype, threads: int, depth: int, columns: int) -> None:
    """Every M to 64 (one thread) and more, shifted rows, packed or not, in inference and inside autograd."""
    x, weight, bias = _case(0, 1000, depth, columns, dtype)
    whole = ops.linear(x, weight, bias, invariant=True)
    torch.set_num_threads(threads)
    parameter = weight.clone().requires_grad_()
    packed = weight.clone()
    ops.prepack(packed)
    counts = [*range(1, 65), 100, 1000] if threads == 1 and depth < 1000 else [1, 2, 5, 6, 7, 16, 63, 64, 100, 1000]
    for count in counts:
        for start in {0, 3, 1000 - count} if count < 997 else {0}:
            rows = slice(start, start + count)
            assert torch.equal(ops.linear(x[rows], weight, bias, invariant=True), whole[rows])
            assert torch.equal(ops.linear(x[rows], packed, bias, invariant=True), whole[rows])
            if count in (1, 5, 64, 1000):
                assert torch.equal(ops.linear(x[rows], parameter, bias, invariant=True), whole[rows])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("depth", "columns"), [(128, 256), (384, 128), (96, 100)])
def test_padding_makes_torch_rows_independent(threads: int, depth: int, columns: int) -> None:
    """The path without the kernel, float32: bitwise with MKL on AVX-512. Elsewhere (MKL on AVX2, other libraries) the
    library still chooses by the number of rows, and padding promises rounding only."""
    exact = torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    torch.set_num_threads(threads)
    x, weight, bias = _case(0, 300, depth, columns, torch.float32)
    whole = F.linear(x, weight, bias)
    for count, start in itertools.product([*range(1, 25), 33, 63, 64, 100, 297], (0, 3)):
        rows = slice(start, start + count)
        found = matmul._padded(x[rows], weight, bias)
        torch.testing.assert_close(found, whole[rows], rtol=1e-5, atol=1e-5 * depth**0.5)
        assert not exact or torch.equal(found, whole[rows])


@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_gradients_equal_float64(depth: int, columns: int) -> None:
    inputs = _case(1, 19, depth, columns, torch.float32)
    mine, theirs = [x.clone().requires_grad_() for x in inputs], [x.double().requires_grad_() for x in inputs]
    ops.linear(*mine, invariant=True).square().sum().backward()
    F.linear(*theirs).square().sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("inference", [True, False])
def test_panels_follow_the_weight(inference: bool) -> None:
    x, weight, _ = _case(2, 3, 32, 48, torch.float32)
    with torch.inference_mode(inference):
        weight = weight.clone()
        ops.prepack(weight)
        before = getattr(weight, matmul._PANELS)[0]
        weight.mul_(2)
        if (
            not inference
        ):  # a changed weight is noticed; inference tensors have no version, so they must be packed again
            assert torch.equal(ops.linear(x, weight, invariant=True), ops.linear(x, weight.clone(), invariant=True))
        ops.prepack(weight)
        after = getattr(weight, matmul._PANELS)[0]
        assert after.data_ptr() == before.data_ptr()
        assert torch.equal(ops.linear(x, weight, invariant=True), ops.linear(x, weight.clone(), invariant=True))


@pytest.mark.usefixtures("native")
def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        ops.linear(torch.ones(2, 8), torch.ones(4, 7), invariant=True)
