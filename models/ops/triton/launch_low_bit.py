"""Launch the kernels of low-bit products by the rules of `launch`: plans depend on shapes and dtypes.

Products choose their tile and the split of K by the number of rows where no bit depends on either.
"""

from typing import Any

import torch
from torch import Tensor

from models.low_bit import FP8_LARGEST, LEVELS
from models.ops.low_bit_reference import SMALLEST
from models.ops.triton import eight_bits, low_bit
from models.ops.triton.direct import Launch, run_plan
from models.ops.triton.launch import Run, plan_rms_norm, plan_swiglu, power_of_2

_TILE_DEPTH = 128  # bytes of a contiguous part of a row; divides every matrix of Qwen2.5
# Two for each multiprocessor of an H100. Of a matrix with fewer tiles K is split, until there are as many programs: a
# program has six times 4 KiB of weights under way, and 2.3 MiB must be, for all of the memory's bandwidth.
_SPLIT_PROGRAMS = 264
_LEAST_PARTS = 16  # of _TILE_DEPTH that a split has at least: adding sums takes as long as ten
_LEAST_GROUPS = 8  # of four bits
_MOST_PARTS = 16
_MANY_ROWS = 64  # that share a tile; beyond, tiles are of 128 rows: K is split in at most four, since one program adds
_FEW_ROWS = 16  # up to which sums of groups are small beside the weights
_WIDEST_ROW = 32_768  # that one program keeps in registers
_arrived: dict[torch.device, Tensor] = {}


def _rounding(dtype: torch.dtype) -> dict[str, Any]:
    """Constants of kernels that round to int8 or float8_e4m3fn."""
    integer = dtype is torch.int8
    return {"INTEGER": integer, "LEVELS": float(LEVELS) if integer else FP8_LARGEST, "SMALLEST": SMALLEST}


def plan_quantise_tokens(x: Tensor, values: Tensor, scales: Tensor) -> list[Launch]:
    rows, depth = x.shape
    block = min(power_of_2(depth), 8192)
    return [
        Launch(
            kernel=eight_bits.quantise_tokens,
            grid=(rows,),
            arguments=(x, values, scales),
            constants={"DEPTH": depth, "STRIDE": x.stride(0), "BLOCK": block} | _rounding(values.dtype),
            warps=min(max(block // 512, 1), 16),
        ),
    ]


def quantise_tokens(x: Tensor, dtype: torch.dtype, run: Run = run_plan) -> tuple[Tensor, Tensor]:
    x = x if x.stride(1) == 1 else x.contiguous()
    values, scales = _eight_bits(x, x.shape[1], dtype)
    if x.numel():
        run(plan_quantise_tokens, x, values, scales)
    return values, scales


def plan_add_norm_quantise(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, values: Tensor, scales: Tensor, total: Tensor
) -> list[Launch]:
    (norm,) = plan_rms_norm(x, residual, weight, eps, x, total)  # whose block and warps give its sums their order
    constants = {name: norm.constants[name] for name in ("SIZE", "WIDTH")}
    return [
        Launch(
            kernel=eight_bits.add_norm_quantise,
            grid=norm.grid,
            arguments=(x, residual, weight, values, scales, total, eps),
            constants=constants | _rounding(values.dtype),
            warps=norm.warps,
        )
    ]


def add_norm_quantise(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, run: Run = run_plan
) -> tuple[Tensor, Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    (values, scales), total = _eight_bits(x, x.shape[1], dtype), torch.empty_like(x)
    if x.numel():
        run(plan_add_norm_quantise, x, residual, weight, eps, values, scales, total)
    return values, scales, total


def plan_swiglu_quantise(gate_up: Tensor, values: Tensor, scales: Tensor) -> list[Launch]:
    rows, size = values.shape
    if size > _WIDEST_ROW:
        gated = gate_up.new_empty((rows, size))
        return [*plan_swiglu(gate_up, gated), *plan_quantise_tokens(gated, values, scales)]
    head = power_of_2(size + 1) // 2
    tail = power_of_2(size - head) if size > head else 0
    return [
        Launch(
            kernel=eight_bits.swiglu_quantise,
            grid=(rows,),
            arguments=(gate_up, values, scales),
            constants={"SIZE": size, "HEAD": head, "TAIL": tail} | _rounding(values.dtype),
            warps=min(max(head // 512, 1), 16),
        )
    ]


def swiglu_quantise(gate_up: Tensor, dtype: torch.dtype, run: Run = run_plan) -> tuple[Tensor, Tensor]:
    gate_up = gate_up.contiguous()
    values, scales = _eight_bits(gate_up, gate_up.shape[1] // 2, dtype)
    if values.numel():
        run(plan_swiglu_quantise, gate_up, values, scales)
    return values, scales


def _eight_bits(x: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return uninitialised values [T, size] and scales [T, 1] of the rows of x."""
    return x.new_empty((x.shape[0], size), dtype=dtype), x.new_empty((x.shape[0], 1), dtype=torch.float32)


def plan_low_bit_linear(
    x: Tensor,
    token_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    arrived: Tensor,
) -> list[Launch]:
    """The dtypes tell the format: int8 by int8, fp8 by fp8, int8 by nibbles, or floats by nibbles.

    arrived: int32 [_SPLIT_PROGRAMS], zeros, which products one after the other share."""
    rows, depth = x.shape
    columns, groups = scales.shape
    integer, four = x.dtype is torch.int8, zeros is not None
    tile_rows, tile_columns, warps, stages = (
        _unpacked_tiles(rows, columns) if four and not integer else _tiles(rows, columns, integer, four)
    )
    grid: tuple[int, ...] = (-(-rows // tile_rows), -(-columns // tile_columns))
    tiles = grid[0] * grid[1]
    constants = {"COLUMNS": columns, "BIAS": bias is not None, "TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns}
    of_tokens, added = scales if token_scales is None else token_scales, scales if bias is None else bias

    def sums(slots: int) -> Tensor:
        if splits == 1:
            return arrived
        kind = torch.int32 if integer and not four else torch.float32
        return torch.empty((tiles, slots, tile_rows, tile_columns), dtype=kind, device=x.device)

    arguments: tuple[Any, ...]
    steps = -(-depth // _TILE_DEPTH)
    if zeros is None:
        part = part_of(columns, steps)
        splits = splits_of(rows, columns, depth) if integer else _splits_of_parts(tiles, steps, part)
        kernel = low_bit.multiply_bytes
        arguments = x, of_tokens, weight, scales, added, out, sums(splits), arrived, rows, splits
        constants |= {"DEPTH": depth, "TILE_DEPTH": _TILE_DEPTH, "INTEGER": integer, "PART": steps if integer else part}
    elif integer:
        splits = splits_of_groups(rows, columns, groups)
        kernel = low_bit.multiply_nibbles
        slots = groups - groups // splits + 1
        arguments = x, of_tokens, weight, scales, zeros, added, out, sums(slots), arrived, rows, splits
        constants |= {"GROUPS": groups, "GROUP": depth // groups}
    else:
        part = groups_of_part(columns, groups)
        splits = _splits_of_parts(tiles, groups, part)
        kernel = low_bit.multiply_unpacked
        arguments = x, weight, scales, zeros, added, out, sums(splits), arrived, rows
        constants |= {"GROUPS": groups, "GROUP": depth // groups, "PART": part}
    return [
        Launch(
            kernel=kernel,
            grid=(*grid, splits),
            arguments=arguments,
            constants=constants | {"SPLIT": splits > 1},
            warps=warps,
            stages=stages,
        )
    ]


def splits_of(rows: int, columns: int, depth: int) -> int:
    """Return the parts of K that an int8 product [rows, depth] times [columns, depth] has programs of their own for."""
    tile_rows, tile_columns, *_ = _tiles(rows, columns, True, False)
    tiles, steps = -(-rows // tile_rows) * -(-columns // tile_columns), -(-depth // _TILE_DEPTH)
    many = tile_rows > _MANY_ROWS
    return max(min(_SPLIT_PROGRAMS // tiles, steps // (4 if many else _LEAST_PARTS), 4 if many else _MOST_PARTS), 1)


def splits_of_groups(rows: int, columns: int, groups: int) -> int:
    """Return the same of a product of int8 by four bits."""
    tile_rows, tile_columns, *_ = _tiles(rows, columns, True, True)
    tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
    few = rows <= _FEW_ROWS
    return max(min(_SPLIT_PROGRAMS // tiles, groups // _LEAST_GROUPS, _MOST_PARTS), 1) if few else 1


def part_of(columns: int, steps: int) -> int:
    """Return the tiles of K whose fp8 sums are added before those of other parts: of a matrix, whatever the rows."""
    return _part(-(-columns // _tiles(1, columns, False, False)[1]), steps, _LEAST_PARTS)


def groups_of_part(columns: int, groups: int) -> int:
    """Return the groups whose float sums are added before those of other parts: of a matrix, whatever the rows."""
    return _part(-(-columns // _unpacked_tiles(1, columns)[1]), groups, _LEAST_GROUPS)


def _part(tiles: int, steps: int, least: int) -> int:
    return -(-steps // max(min(_SPLIT_PROGRAMS // tiles, steps // least, _MOST_PARTS), 1))


def _splits_of_parts(tiles: int, steps: int, part: int) -> int:
    """Each part by a program of its own, or all by one where there are programs enough."""
    return -(-steps // part) if tiles < _SPLIT_PROGRAMS else 1


def _unpacked_tiles(rows: int, columns: int) -> tuple[int, int, int, int]:
    """(rows, columns, warps, stages) for four bits with floats. All multiply by one instruction, whose sums do not
    depend on the tile. 32 rows with 128 columns would take all registers."""
    if rows > 16:
        return 32, 64, 4, 4
    return (16, 128, 4, 4) if columns >= 8192 else (16, 64, 4, 6)


def _tiles(rows: int, columns: int, integer: bool, four: bool) -> tuple[int, int, int, int]:
    """(rows, columns, warps, stages). For few rows or columns, smaller tiles: more programs read the weight, each with
    more of it under way."""
    wide = columns >= 8192
    few = 64 if wide else 32
    if not integer:
        return 64, few, 4, 4 if wide else 6
    if rows > _MANY_ROWS:
        return 128, 128, 8, 3
    if rows > 32:
        return 64, few, 4, 4
    tile_rows = 16 if rows <= 16 else 32
    return (tile_rows, 64, 4, 6) if four else (tile_rows, few, 4, 4 if wide else 7)


def low_bit_linear(
    x: Tensor,
    token_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    x, weight, scales = x.contiguous(), weight.contiguous(), scales.contiguous()
    zeros = None if zeros is None else zeros.contiguous()
    out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
    if out.numel():
        arrived = _arrived.get(x.device)
        if arrived is None:  # never first in a capture: what is captured has run before
            arrived = _arrived[x.device] = torch.zeros(_SPLIT_PROGRAMS, dtype=torch.int32, device=x.device)
        run_plan(plan_low_bit_linear, x, token_scales, weight, scales, zeros, bias, out, arrived)
    return out
