"""Every operator `paceline::*` on the device against its oracle on the CPU, and what kernels promise bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tests.pretended
from config.formats import FORMATS
from models.low_bit import quantise
from models.ops import low_bit, low_bit_reference
from models.ops.triton import LAUNCHES, direct, low_bit_operators, operators
from models.ops.triton.low_bit_operators import FP8_CAPABILITY
from tests.ops.test_operators import arguments, operator_named, tensors
from tests.ops.triton.paged import Paged, paged

DEVICE = "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# Hopper's fp8 products keep about 14 bits inside the 128 inputs that are summed before float32 takes over; emulated
# at this shape, the worst output is off by 5e-4.
FP8_TOLERANCE = 2e-3
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
# Rows at the end of contexts: decoding beside verification, a prompt chunk, and one of 32k tokens.
QUERIES, CONTEXTS = (1, 17, 1, 64), (32_768, 300, 1, 2048)
HEADS = 7, 1, 128
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
real = pytest.mark.skipif(
    tests.pretended.active(), reason="the pretended device computes oracles: their bits promise nothing"
)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    if expected.is_floating_point():
        torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    else:
        assert torch.equal(found.cpu(), expected)


def assert_bitwise(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))


@DTYPES
@pytest.mark.parametrize("name", LAUNCHES)
def test_an_operator_is_its_oracle(name: str, dtype: torch.dtype) -> None:
    """What it returns, and what it writes."""
    given: tuple[Any, ...] = arguments(dtype)[name]
    there = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in given]
    operator = operator_named(name)
    found, expected = tensors(operator(*there)), tensors(operator(*given))
    written = [(x, y) for x, y in zip(there, given, strict=True) if isinstance(y, Tensor)]
    for mine, oracles in [*zip(found, expected, strict=True), *written]:
        if name in ("add_norm_quantise", "swiglu_quantise") and oracles.dtype is torch.int8:
            # The device sums squares in another order, and divides by another instruction: halves may go elsewhere.
            assert (mine.cpu().int() - oracles.int()).abs().max() <= 1
        else:
            assert_near(mine, oracles, dtype)


@real
@DTYPES
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_norms_and_swiglu_in_eight_bits_are_those_of_two_kernels(kind: torch.dtype, dtype: torch.dtype) -> None:
    if kind is torch.float8_e4m3fn and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this GPU has no fp8")
    generator = torch.Generator().manual_seed(0)
    x, residual, gain = (torch.randn(n, 3584, generator=generator).to(DEVICE, dtype) for n in (33, 33, 1))
    values, scales, total = low_bit_operators.add_norm_quantise(x, residual, gain[0], 1e-6, kind)
    normed, expected_total = operators.add_rms_norm(x, residual, gain[0], 1e-6)
    gate_up = torch.cat((x, residual), 1)
    gated = low_bit_operators.quantise_tokens(operators.swiglu(gate_up), kind)
    expected = *low_bit_operators.quantise_tokens(normed, kind), expected_total, *gated
    found = values, scales, total, *low_bit_operators.swiglu_quantise(gate_up, kind)
    for mine, theirs in zip(found, expected, strict=True):
        assert_bitwise(mine, theirs)


@real
@pytest.mark.parametrize("name", FORMATS)
def test_kernels_that_start_early_compute_what_they_do_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of dependent kernels, many times over: norm, product, SwiGLU, product."""
    if name == "fp8" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this GPU has no fp8 products")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 896, generator=generator).to(DEVICE, torch.bfloat16)
    up, down = (
        quantise(torch.randn(*shape, generator=generator).to(DEVICE, torch.bfloat16), FORMATS[name])
        for shape in ((9728, 896), (896, 4864))
    )

    def states() -> list[Tensor]:
        state, total, found = x, x, []
        for _ in range(50):
            normed, total = operators.add_rms_norm(state, total, torch.ones_like(x[0]), 1e-6)
            state = low_bit.low_bit_linear(operators.swiglu(low_bit.low_bit_linear(normed, up)), down)
            found.append(state)
        return found

    with torch.inference_mode():
        early = states()
        monkeypatch.setattr(direct, "_apart", True)
        monkeypatch.setattr(direct, "_known", {})
        for mine, theirs in zip(early, states(), strict=True):
            assert_bitwise(mine, theirs)


def case(dtype: torch.dtype, tree: int, padding: int = 3) -> Paged:
    return paged(QUERIES, CONTEXTS, heads=HEADS, tree=tree, padding=padding, dtype=dtype)


@DTYPES
@pytest.mark.parametrize("listed", [True, False], ids=["work list", "lanes"])
@pytest.mark.parametrize("tree", [0, 64, 80])
def test_attention_is_its_oracle(tree: int, listed: bool, dtype: torch.dtype) -> None:
    given = case(dtype, tree)
    found = given.on(DEVICE).attend(listed=listed)
    assert_near(found, given.expected(), dtype)
    assert not found[sum(QUERIES) :].any()


@real
@DTYPES
@pytest.mark.parametrize("tree", [0, 64])
def test_a_rows_attention_is_bitwise_its_own(tree: int, dtype: torch.dtype) -> None:
    """Alone, in the batch, under larger bounds, and whoever walks it."""
    batch = case(dtype, tree).on(DEVICE)
    found = batch.attend()
    assert_bitwise(batch.attend(512, 65_536), found)
    assert_bitwise(batch.attend(listed=True), found)
    assert_bitwise(batch.attend(512, 65_536, listed=True), found)
    for request in range(len(QUERIES)):
        alone, rows = batch.alone(request)
        assert_bitwise(alone.attend(), found[rows])


@DTYPES
def test_draws_from_qwens_vocabulary_are_the_oracles(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = 9
    logits = (torch.randn(rows, 151_936, generator=generator) * 3).to(dtype)
    temperature = torch.where(torch.arange(rows) % 4 == 0, 0.0, 0.9)
    top_k = torch.where(torch.arange(rows) % 2 == 0, 50, 0)
    keys, positions = torch.randint(2**62, (rows,), generator=generator), torch.arange(rows)
    least = operators.cutoff(logits, temperature, top_k, torch.full((rows,), 0.9))
    there = [x.to(DEVICE) for x in (logits, temperature, top_k, torch.full((rows,), 0.9))]
    torch.testing.assert_close(operators.cutoff(*there).cpu(), least, atol=1e-4, rtol=1e-4)
    given = logits, least, temperature, keys, positions
    found, expected = operators.sample(*(x.to(DEVICE) for x in given)), operators.sample(*given)
    assert torch.equal(found[0].cpu(), expected[0])
    for mine, oracles in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine.cpu(), oracles, atol=1e-4, rtol=1e-4)


@real
@DTYPES
def test_a_row_of_a_fixed_tile_product_is_bitwise_its_own(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 896, generator=generator).to(DEVICE, dtype) for n in (130, 1152))
    found = operators.linear(x, weight, None, False)
    for rows in (1, 17, 64):
        assert_bitwise(operators.linear(x[:rows], weight, None, False), found[:rows])
    assert_bitwise(operators.linear(x[100:], weight, None, False), found[100:])


@DTYPES
@pytest.mark.parametrize("name", FORMATS)
def test_a_low_bit_product_is_its_oracle_and_bitwise_where_its_sums_are_integers(name: str, dtype: torch.dtype) -> None:
    """At a shape of Qwen2.5-0.5B, for the tiles of few rows and of many; rows bitwise their own."""
    if name == "fp8" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this GPU has no fp8 products")
    generator = torch.Generator().manual_seed(0)
    x, full = (torch.randn(n, 896, generator=generator) for n in (300, 1152))
    x, bias = x.to(dtype), torch.randn(1152, generator=generator).to(dtype)
    weight = quantise(full.to(dtype), FORMATS[name])
    there = quantise(full.to(DEVICE, dtype), FORMATS[name])
    for mine, oracles in zip((there.values, there.scales), (weight.values, weight.scales), strict=True):
        assert_bitwise(mine, oracles)
    with torch.inference_mode():
        together = low_bit.low_bit_linear(x.to(DEVICE), there, bias.to(DEVICE))
        expected = low_bit_reference.reference(x, weight, bias)
        for part in (slice(0, 1), slice(3, 35), slice(100, 164), slice(0, 300)):
            found = low_bit.low_bit_linear(x[part].to(DEVICE), there, bias.to(DEVICE))
            if not tests.pretended.active():
                assert_bitwise(found, together[part])
            if weight.format.activations == "int8":
                assert_bitwise(found, expected[part])
            elif name == "fp8" and dtype is torch.float32:
                torch.testing.assert_close(
                    found.cpu() / 30, expected[part] / 30, atol=FP8_TOLERANCE, rtol=FP8_TOLERANCE
                )
            else:
                assert_near(found / 30, expected[part] / 30, dtype)
