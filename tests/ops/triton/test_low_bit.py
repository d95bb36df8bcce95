"""Tokens and products in few bits in Triton's interpreter: integer formats bitwise the oracle, whatever the batch."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from config.formats import FORMATS, LowBitFormat
from models.low_bit import LowBitWeight, quantise
from models.ops import low_bit_reference
from models.ops.triton import launch, launch_low_bit
from models.ops.triton.low_bit_operators import require_products

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
INTEGERS = pytest.mark.parametrize("name", ["w8a8", "w4a8", "w3a8", "w2a8"])
W8A8 = FORMATS["w8a8"]
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def multiplied(x: Tensor, weight: LowBitWeight, bias: Tensor | None = None) -> Tensor:
    """By the kernels."""
    tokens: tuple[Tensor, Tensor | None] = x, None
    if weight.format.activations != "none":
        dtype = torch.int8 if weight.format.activations == "int8" else torch.float8_e4m3fn
        tokens = launch_low_bit.quantise_tokens(x, dtype)
    return launch_low_bit.low_bit_linear(*tokens, weight.values, weight.scales, weight.zeros, bias, x.dtype)


@DTYPES
@pytest.mark.parametrize("kind", EIGHT_BITS, ids=["int8", "fp8"])
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(0, 9),
    depth=st.integers(1, 300),
    magnitude=st.integers(-126, 120),
    seed=st.integers(0, 2**31),
)
def test_tokens_are_rounded_as_the_oracle_rounds_them(
    kind: torch.dtype, dtype: torch.dtype, rows: int, depth: int, magnitude: int, seed: int
) -> None:
    x = random(rows, depth, dtype=dtype, seed=seed) * 2.0**magnitude
    found, expected = launch_low_bit.quantise_tokens(x, kind), low_bit_reference.rounded_tokens(x, kind)
    for mine, oracles in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (oracles.dtype, oracles.shape)
        assert torch.equal(bits(mine), bits(oracles))


@pytest.mark.parametrize("kind", EIGHT_BITS, ids=["int8", "fp8"])
def test_tokens_of_zeros_halves_and_what_is_not_finite(kind: torch.dtype) -> None:
    x = torch.zeros(6, 20_000)
    x[1, :3] = torch.tensor([127.0, 0.5, 2.5])  # halves go to even
    x[2, 19_999], x[3, 7], x[4, 0] = torch.nan, torch.inf, 2.0**-101
    x[5] = random(20_000)
    found, expected = launch_low_bit.quantise_tokens(x, kind), low_bit_reference.rounded_tokens(x, kind)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0, equal_nan=True)
    for row in range(6):
        if expected[1][row].isfinite():
            assert torch.equal(bits(found[0][row]), bits(expected[0][row])), row
    apart = torch.cat((x, x), 1)[:, :20_000]
    assert torch.equal(bits(launch_low_bit.quantise_tokens(apart, kind)[0]), bits(found[0])), "rows may be apart"


def rows_of(rows: int, size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random rows, one of zeros among them, and one with what is not finite."""
    x = random(rows, size, dtype=dtype, seed=seed)
    if rows > 2:
        x[0], x[1, seed % size] = 0.0, (torch.nan, torch.inf)[seed % 2]
    return x


@DTYPES
@pytest.mark.parametrize("kind", EIGHT_BITS, ids=["int8", "fp8"])
@settings(max_examples=10, deadline=None)
@given(rows=st.integers(0, 7), size=st.integers(1, 600), seed=st.integers(0, 2**31))
def test_norms_and_swiglu_in_eight_bits_are_those_of_two_kernels_bit_for_bit(
    kind: torch.dtype, dtype: torch.dtype, rows: int, size: int, seed: int
) -> None:
    """Sizes of a power of two and others; a row of zeros, and one that is not finite."""
    x, residual, weight = rows_of(rows, size, dtype, seed), random(rows, size, dtype=dtype), random(size, dtype=dtype)
    values, scales, total = launch_low_bit.add_norm_quantise(x, residual, weight, 1e-6, kind)
    normed, expected_total = launch.add_rms_norm(x, residual, weight, 1e-6)
    gate_up = torch.cat((x, residual), 1)
    gated = launch_low_bit.swiglu_quantise(gate_up, kind)
    found = (values, scales, total, *gated)
    expected = (
        *launch_low_bit.quantise_tokens(normed, kind),
        expected_total,
        *launch_low_bit.quantise_tokens(launch.swiglu(gate_up), kind),
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(bits(mine), bits(theirs))


@pytest.mark.parametrize("widest", [256, 512])
def test_rows_that_fill_no_registers_take_two_kernels(widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up = random(3, 1024, dtype=torch.bfloat16)
    expected = launch_low_bit.quantise_tokens(launch.swiglu(gate_up), torch.int8)
    monkeypatch.setattr(launch_low_bit, "_WIDEST_ROW", widest)
    values, scales = gate_up.new_empty(3, 512, dtype=torch.int8), torch.empty(3, 1)
    assert len(launch_low_bit.plan_swiglu_quantise(gate_up, values, scales)) == (2 if widest < 512 else 1)
    for mine, theirs in zip(launch_low_bit.swiglu_quantise(gate_up, torch.int8), expected, strict=True):
        assert torch.equal(bits(mine), bits(theirs))


@DTYPES
@INTEGERS
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 140),
    columns=st.integers(1, 150),
    depth=st.integers(1, 3),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_integer_products_are_the_oracles_bit_for_bit(
    name: str, dtype: torch.dtype, rows: int, columns: int, depth: int, bias: bool, seed: int
) -> None:
    form = FORMATS[name]
    inputs = depth * 64 if form.group else depth * 77  # rows of bytes end inside a tile, too
    x = random(rows, inputs, dtype=dtype, seed=seed)
    weight = quantise(random(columns, inputs, seed=seed + 1), form)
    added = random(columns, dtype=dtype, seed=seed + 2) if bias else None
    assert torch.equal(bits(multiplied(x, weight, added)), bits(low_bit_reference.reference(x, weight, added)))


@DTYPES
@settings(max_examples=6, deadline=None)
@given(rows=st.integers(1, 140), columns=st.integers(1, 70), depth=st.integers(1, 900), seed=st.integers(0, 2**31))
def test_bits_of_integer_products_do_not_depend_on_the_split_of_k(
    dtype: torch.dtype, rows: int, columns: int, depth: int, seed: int
) -> None:
    x, weight = random(rows, depth, dtype=dtype, seed=seed), quantise(random(columns, depth, seed=seed + 1), W8A8)
    expected, parts = low_bit_reference.reference(x, weight), -(-depth // launch_low_bit._TILE_DEPTH)
    tokens = launch_low_bit.quantise_tokens(x, torch.int8)  # once: four fifths of the interpreter's work
    with pytest.MonkeyPatch.context() as patch:
        for splits in {1, 2, 3, parts}:
            patch.setattr(launch_low_bit, "splits_of", lambda *shape, splits=splits: splits)
            found = launch_low_bit.low_bit_linear(*tokens, weight.values, weight.scales, None, None, dtype)
            assert torch.equal(bits(found), bits(expected)), splits
            (arrived,) = launch_low_bit._arrived.values()
            assert not arrived.any(), "the next product begins with zeros"


def test_matrices_with_few_tiles_are_split_for_few_rows() -> None:
    """Shapes of Qwen2.5's o, gate_up and down: as many programs as the device takes at once, of 2 KiB of a row each."""
    splits_of, of_groups = launch_low_bit.splits_of, launch_low_bit.splits_of_groups
    for rows in (1, 8, 16):
        assert (splits_of(rows, 896, 896), splits_of(rows, 896, 4864)) == (1, 2)
        assert (splits_of(rows, 1536, 1536), splits_of(rows, 1536, 8960)) == (1, 4)
        assert (splits_of(rows, 3584, 3584), splits_of(rows, 3584, 18_944)) == (1, 2)
        assert splits_of(rows, 37_888, 3584) == 1
        assert (of_groups(rows, 1536, 70), of_groups(rows, 3584, 148), of_groups(rows, 37_888, 28)) == (8, 4, 1)
    assert splits_of(96, 3584, 18_944) == 4
    assert splits_of(4096, 3584, 18_944) == 1
    assert of_groups(17, 3584, 148) == 1


@DTYPES
@pytest.mark.parametrize("name", ["w4a8", "w2a8"])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_bits_of_int8_by_four_bits_do_not_depend_on_the_splits(name: str, rows: int, dtype: torch.dtype) -> None:
    """Sums of groups are floats: they are added in order, whoever has computed them."""
    x, weight = random(rows, 11 * 64, dtype=dtype), quantise(random(70, 11 * 64, seed=1), FORMATS[name])
    expected = low_bit_reference.reference(x, weight)
    with pytest.MonkeyPatch.context() as patch:
        for splits in (1, 2, 3, 11):
            patch.setattr(launch_low_bit, "splits_of_groups", lambda *shape, splits=splits: splits)
            assert torch.equal(bits(multiplied(x, weight)), bits(expected)), splits
            (arrived,) = launch_low_bit._arrived.values()
            assert not arrived.any(), "the next product begins with zeros"


@DTYPES
@pytest.mark.parametrize("inputs", [1300, 1536], ids=["11 steps", "12 steps"])
def test_bits_of_fp8_do_not_depend_on_who_adds_the_parts(
    dtype: torch.dtype, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part by a program of its own, or all by one; with few rows or many. Parts change the order of sums."""
    x, weight = random(70, inputs, dtype=dtype), quantise(random(40, inputs, seed=1), FORMATS["fp8"])
    in_one = multiplied(x, weight)
    monkeypatch.setattr(launch_low_bit, "part_of", lambda columns, steps: 5)
    apart = multiplied(x, weight)
    assert torch.equal(bits(multiplied(x[3:5], weight)), bits(apart[3:5]))
    (arrived,) = launch_low_bit._arrived.values()
    assert not arrived.any()
    monkeypatch.setattr(launch_low_bit, "_SPLIT_PROGRAMS", 1)
    assert torch.equal(bits(multiplied(x, weight)), bits(apart))
    torch.testing.assert_close(apart, in_one, atol=2e-2, rtol=2e-2)
    assert dtype is torch.bfloat16 or not torch.equal(bits(apart), bits(in_one))


@DTYPES
@pytest.mark.parametrize("inputs", [1088, 1536], ids=["17 groups of 64", "12 groups of 128"])
def test_bits_of_four_bits_with_floats_do_not_depend_on_who_adds_the_parts(
    dtype: torch.dtype, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part by a program of its own, or all by one; with few rows or many, and tiles of more columns."""
    x, weight = random(40, inputs, dtype=dtype), quantise(random(70, inputs, seed=1), FORMATS["w4a16"])
    monkeypatch.setattr(launch_low_bit, "groups_of_part", lambda columns, groups: 5)
    apart = multiplied(x, weight)
    assert torch.equal(bits(multiplied(x[3:5], weight)), bits(apart[3:5]))
    (arrived,) = launch_low_bit._arrived.values()
    assert not arrived.any()
    monkeypatch.setattr(launch_low_bit, "_unpacked_tiles", lambda rows, columns: (16, 128, 4, 4))
    assert torch.equal(bits(multiplied(x, weight)), bits(apart))
    monkeypatch.setattr(launch_low_bit, "_SPLIT_PROGRAMS", 1)
    assert torch.equal(bits(multiplied(x, weight)), bits(apart))


def test_places_of_parts_follow_from_the_matrix_alone() -> None:
    """And each is whole groups, in as many programs as the device takes at once."""
    shapes = (3584, 148), (37_888, 28), (1536, 70), (3584, 28)
    assert [launch_low_bit.groups_of_part(*shape) for shape in shapes] == [37, 28, 9, 10]
    assert [launch_low_bit.part_of(*shape) for shape in shapes] == [74, 28, 18, 28]


@pytest.mark.parametrize("name", ["w4a16", "fp8"])
@DTYPES
def test_products_with_float_sums_are_the_oracles_but_for_their_order(name: str, dtype: torch.dtype) -> None:
    x, form = random(70, 384, dtype=dtype), FORMATS[name]
    weight, bias = quantise(random(90, 384, seed=1), form), random(90, dtype=dtype, seed=2)
    found, expected = multiplied(x, weight, bias), low_bit_reference.reference(x, weight, bias)
    tolerance = 2e-4 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, atol=tolerance * 384**0.5, rtol=tolerance)


@pytest.mark.parametrize("name", FORMATS)
def test_a_rows_product_is_the_same_in_any_batch_and_place(name: str) -> None:
    """Beyond the tile of few rows, too: integer formats change tiles there."""
    x, weight = random(150, 256, dtype=torch.bfloat16), quantise(random(70, 256, seed=1), FORMATS[name])
    together = multiplied(x, weight)
    for part in (slice(0, 1), slice(64, 65), slice(100, 117), slice(3, 70), slice(20, 52)):
        assert torch.equal(bits(multiplied(x[part], weight)), bits(together[part]))


@pytest.mark.parametrize("where", [0, 63, 64, 130])
def test_a_token_that_is_not_finite_spoils_its_own_row_only(where: int) -> None:
    x, weight = random(131, 128), quantise(random(16, 128, seed=1), FORMATS["w8a8"])
    expected = low_bit_reference.reference(x, weight)
    x[where, 5] = torch.nan
    found = multiplied(x, weight)
    assert found[where].isnan().all()
    others = torch.arange(131) != where
    assert torch.equal(found[others], expected[others])


def capability(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize("version", [(8, 9), (9, 0), (10, 0)])
def test_fp8_runs_where_there_are_products_of_it(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    capability(monkeypatch, version)
    require_products(FORMATS["fp8"], "cuda")


def test_fp8_is_refused_by_name_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    capability(monkeypatch, (8, 0))
    with pytest.raises(ValueError, match=r"rollout.quantization=fp8: NVIDIA A100.*capability 8\.0.*8\.9.*take w8a8"):
        require_products(FORMATS["fp8"], "cuda")
    require_products(FORMATS["fp8"], "cpu")  # where the format is refused by the table, or is the oracle's
    require_products(FORMATS["w8a8"], "cuda")


def plan(rows: int, form: LowBitFormat) -> Callable[[str], int]:
    weight = quantise(random(256, 256), form)
    x = torch.empty(rows, 256, dtype=torch.bfloat16 if form.activations == "none" else torch.int8)
    if form.name == "fp8":
        x = x.to(torch.float8_e4m3fn)
    scales = None if form.activations == "none" else torch.ones(rows, 1)
    out = torch.empty(rows, 256)
    arrived = torch.zeros(launch_low_bit._SPLIT_PROGRAMS, dtype=torch.int32)
    of_weight = weight.values, weight.scales, weight.zeros, None
    (found,) = launch_low_bit.plan_low_bit_linear(x, scales, *of_weight, out, arrived)
    return found.constants.__getitem__


def test_only_fp8_has_one_tile_for_all_numbers_of_rows() -> None:
    for name, form in FORMATS.items():
        tiles = {plan(rows, form)("TILE_ROWS") for rows in (1, 16, 17, 64, 65, 4096)}
        assert (len(tiles) > 1) is (name != "fp8"), name
