"""Products with weights in few bits: the kernel against torch's oracle, bit for bit."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from config.formats import DEEPEST, FORMATS
from models.low_bit import LowBitWeight, dequantise, quantise
from models.ops import low_bit_reference
from models.ops.low_bit import low_bit_linear, low_bit_panels, packable, prepack_low_bit, quantise_tokens
from models.ops.low_bit_reference import reference

pytestmark = pytest.mark.usefixtures("native")
INTEGER = ["w8a8", "w4a8", "w3a8", "w2a8"]
DTYPES = [torch.float32, torch.bfloat16]


def weight_of(name: str, columns: int, depth: int, seed: int = 0) -> LowBitWeight:
    generator = torch.Generator().manual_seed(seed)
    return quantise(torch.randn(columns, depth, generator=generator), FORMATS[name])


def rows_of(rows: int, depth: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found.isnan(), expected.isnan())
    whole = torch.int32 if found.dtype is torch.float32 else torch.int16
    numbers = ~expected.isnan()
    assert torch.equal(found.view(whole)[numbers], expected.view(whole)[numbers])


@given(
    name=st.sampled_from(INTEGER),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 70),
    columns=st.integers(1, 200),
    depth=st.integers(1, 400),
    with_bias=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_a_product_has_the_bits_of_the_oracle(
    name: str, dtype: torch.dtype, rows: int, columns: int, depth: int, with_bias: bool, threads: int, seed: int
) -> None:
    if FORMATS[name].group is not None:
        depth = (1 + depth // 64) * 64
    weight = weight_of(name, columns, depth, seed)
    wide = rows_of(rows, 2 * depth + 3, dtype, seed)
    x = wide[:, 1 : depth + 1]  # rows are apart, and not aligned
    bias = rows_of(1, columns, dtype)[0] if with_bias else None
    torch.set_num_threads(threads)
    found = low_bit_linear(x, weight, bias)
    torch.set_num_threads(1)
    assert_same_bits(found, reference(x, weight, bias))


@pytest.mark.parametrize(("depth", "groups"), [(64, 1), (128, 1), (192, 3), (576, 9), (1536, 12)])
@pytest.mark.parametrize("name", ["w4a8", "w3a8", "w2a8"])
def test_a_matrix_that_groups_of_128_do_not_divide_has_groups_of_64(name: str, depth: int, groups: int) -> None:
    weight, x = weight_of(name, 40, depth), rows_of(30, depth)
    assert weight.scales.shape == (40, groups)
    assert packable(weight)
    assert_same_bits(low_bit_linear(x, weight), reference(x, weight))
    exact = torch.randn(40, depth, generator=torch.Generator().manual_seed(0))
    steps = weight.scales.repeat_interleave(depth // groups, 1)
    assert ((dequantise(weight) - exact).abs() <= 0.501 * steps).all(), "every value is rounded in its own group"


@pytest.mark.parametrize("group", [8, 16, 48, 64, 192])
def test_groups_that_are_no_whole_tiles_are_left_to_the_oracle(group: int) -> None:
    """Panels have whole tiles of 64 inputs: a kernel would read another group's values, and past the last one's."""
    form = replace(FORMATS["w4a8"], group=group)
    for depth in (group, 2 * group, 3 * group):
        weight = quantise(torch.randn(24, depth, generator=torch.Generator().manual_seed(depth)), form)
        x = rows_of(5, depth)
        assert packable(weight) == (group % 64 == 0)
        assert_same_bits(low_bit_linear(x, weight), reference(x, weight))


@pytest.mark.parametrize("depth", [512, 576])
@pytest.mark.parametrize("name", INTEGER)
def test_every_number_of_rows_gives_a_row_the_same_bits_on_any_number_of_threads(name: str, depth: int) -> None:
    weight, x = weight_of(name, 1030, depth), rows_of(70, depth)
    expected = reference(x, weight)
    for rows in range(1, 71):
        torch.set_num_threads(1 + rows % 2)
        assert_same_bits(low_bit_linear(x[:rows], weight), expected[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INTEGER)
def test_rows_that_are_not_finite_are_nan_and_leave_the_others_alone(name: str, dtype: torch.dtype) -> None:
    weight, x = weight_of(name, 33, 256), rows_of(9, 256, dtype)
    x[1, 3], x[2, 255], x[4, 0] = torch.nan, torch.inf, -torch.inf
    x[5] = 0
    x[6] *= 1e-35  # largest value under 2^-100: zeros
    x[7] *= 1e-25
    x[8, 7] = 3e38
    bias = rows_of(1, 33, dtype)[0]
    found = low_bit_linear(x, weight, bias)
    assert_same_bits(found, reference(x, weight, bias))
    assert found.isnan().all(1).tolist() == [i in (1, 2, 4) for i in range(9)]
    assert torch.equal(found[5], bias)
    assert torch.equal(found[6], bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_rounded_as_the_oracle_rounds_them(dtype: torch.dtype) -> None:
    halves = torch.arange(-127, 128).repeat(3).view(3, -1) + 0.5  # in bfloat16 ties are frequent
    x = torch.cat((rows_of(200, 255), halves)).to(dtype)
    x[3, 4], x[5], x[6, 2] = torch.nan, 0, torch.inf
    values, scales = quantise_tokens(x)
    expected_values, expected_scales = low_bit_reference.quantise_tokens(x)
    assert torch.equal(values, expected_values)
    assert_same_bits(scales, expected_scales)


@pytest.mark.parametrize("depth", [256, 4096])
def test_extremes_do_not_saturate(depth: int) -> None:
    signs = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
    weight = quantise(signs[:, None].expand(64, depth) * 3, FORMATS["w8a8"])
    x = torch.ones(4, depth) * torch.tensor([[1.0], [-1.0], [2.0], [-0.5]])
    assert weight.values.abs().min() == 127
    found = low_bit_linear(x, weight)
    assert_same_bits(found, reference(x, weight))
    torch.testing.assert_close(found, x[:, :1] * signs * 3 * depth)


def test_a_weight_may_hold_the_least_byte_and_sums_may_wrap_on_the_way() -> None:
    depth = DEEPEST
    values = torch.full((16, depth), -128, dtype=torch.int8)
    weight = LowBitWeight(FORMATS["w8a8"], values, torch.ones(16, 1))
    x = torch.full((1, depth), -1.0)
    assert_same_bits(low_bit_linear(x, weight), reference(x, weight))
    deeper = LowBitWeight(FORMATS["w8a8"], torch.zeros(1, depth + 1, dtype=torch.int8), torch.ones(1, 1))
    with pytest.raises(ValueError, match="int32"):
        low_bit_linear(torch.zeros(1, depth + 1), deeper)


def test_the_bias_of_a_master_may_be_wider_than_the_row() -> None:
    weight, x, bias = weight_of("w8a8", 40, 100), rows_of(5, 100, torch.bfloat16), rows_of(1, 40)[0]
    assert_same_bits(low_bit_linear(x, weight, bias), reference(x, weight, bias))


@pytest.mark.parametrize("name", INTEGER)
def test_a_weight_changed_in_place_is_packed_again_into_the_same_memory(name: str) -> None:
    weight, other, x = weight_of(name, 50, 256), weight_of(name, 50, 256, seed=5), rows_of(3, 256)
    before = low_bit_linear(x, weight)
    address = low_bit_panels(weight).data_ptr()
    for mine, new in (
        (weight.values, other.values),
        (weight.scales, other.scales),
        *([(weight.zeros, other.zeros)] if weight.zeros is not None and other.zeros is not None else []),
    ):
        mine.copy_(new)
        now = low_bit_linear(x, weight)
        assert_same_bits(now, reference(x, weight))
    assert not torch.equal(before, now)
    assert low_bit_panels(weight).data_ptr() == address


def test_a_change_that_no_counter_shows_is_seen_after_packing_again() -> None:
    weight, x = weight_of("w8a8", 50, 256), rows_of(3, 256)
    before = low_bit_linear(x, weight)
    weight.values.data.neg_()
    assert torch.equal(low_bit_linear(x, weight), before)
    prepack_low_bit(weight)
    assert torch.equal(low_bit_linear(x, weight), -before)


def test_what_does_not_fit_together_is_refused() -> None:
    weight = weight_of("w4a8", 16, 256)
    with pytest.raises(ValueError, match="do not fit"):
        low_bit_linear(rows_of(2, 255), weight)
    with pytest.raises(ValueError, match="do not fit"):
        low_bit_linear(rows_of(2, 256), weight, torch.zeros(15))
    with pytest.raises(ValueError, match="scales"):
        prepack_low_bit(LowBitWeight(weight.format, weight.values, weight.scales[:, :1], weight.zeros))


@pytest.fixture(autouse=True)
def whole_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
