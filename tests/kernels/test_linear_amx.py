"""bfloat16 products by AMX tiles: the order of their sums, and that every number of rows has it."""

import pytest
import torch
from torch import Tensor

from models import ops
from models.ops.native import kernels

SHAPES = [(32, 16), (64, 40), (77, 50), (7, 3), (130, 129)]  # K, N: whole tiles and parts of them
pytestmark = pytest.mark.usefixtures("native", "tiles")


@pytest.fixture
def tiles() -> None:
    if (level := kernels.cpu_level()) != "amx":  # type: ignore[union-attr]
        pytest.skip(f"the kernels are at level {level}: the CPU has no AMX, Linux does not lend it, or PACELINE_CPU")


def _case(rows: int, depth: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(depth)
    shapes = ((rows, depth), (columns, depth), (columns,))
    x, weight, bias = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
    return x, weight, bias


def _by_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """float32 sums as the manual of TDPBF16PS has them: of 32 k the even and the odd ones apart, then both together
    added. A product of two bfloat16 is exact in float32, so a fused multiply-add is an addition of it."""
    products = x.float()[:, None] * weight.float()
    total = torch.zeros(products.shape[:2])
    for block in products.split(32, dim=2):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for k in range(0, block.shape[2], 2):
            even = even + block[:, :, k]
            if k + 1 < block.shape[2]:
                odd = odd + block[:, :, k + 1]
        total = total + (even + odd)
    return total


@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_sums_are_bitwise_in_the_order_of_the_instruction(depth: int, columns: int) -> None:
    x, weight, bias = _case(33, depth, columns)
    expected = (_by_tiles(x, weight) + bias.float()).bfloat16()
    assert torch.equal(ops.linear(x, weight, bias, invariant=True), expected)


@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_every_number_of_rows_gives_a_row_the_same_bits(depth: int, columns: int) -> None:
    x, weight, bias = _case(150, depth, columns)
    whole = ops.linear(x, weight, bias, invariant=True)
    ops.prepack(weight)
    wide = torch.randn(150, depth + 9).bfloat16()
    wide[:, 3 : 3 + depth] = x  # rows apart, and on no cache line
    for count in range(1, 71):
        rows = slice(150 - count, 150)
        assert torch.equal(ops.linear(x[rows], weight, bias, invariant=True), whole[rows]), count
        assert torch.equal(ops.linear(wide[rows, 3 : 3 + depth], weight, bias, invariant=True), whole[rows]), count


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, weight, _ = _case(40, 45, 20)
    whole = ops.linear(x, weight, invariant=True)
    x[7, 44], x[39, 3] = torch.nan, torch.inf
    found = ops.linear(x, weight, invariant=True)
    assert found[7].isnan().all()
    assert not found[39].isfinite().any()
    others = [row for row in range(40) if row not in (7, 39)]
    assert torch.equal(found[others], whole[others])
