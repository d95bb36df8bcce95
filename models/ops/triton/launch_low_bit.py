"""Launch the kernels of low-bit products by the rules of `launch`: plans depend on shapes and dtypes.

Products choose their tile and the split of K by the number of rows where no bit depends on either: all but fp8's.
"""

from typing import Any

import torch
from torch import Tensor

from models.low_bit import FP8_LARGEST, LEVELS
from models.ops.low_bit_reference import SMALLEST
from models.ops.triton import low_bit
from models.ops.triton.direct import Launch, run_plan
from models.ops.triton.launch import power_of_2

_TILE_DEPTH = 128  # bytes of a contiguous part of a row; divides every matrix of Qwen2.5
# Two for each multiprocessor of an H100. Of a matrix with fewer tiles K is split, until there are as many programs: a
# program has three times 4 KiB of weights under way, and 2.3 MiB must be, for all of the memory's bandwidth.
_SPLIT_PROGRAMS = 264
_LEAST_PARTS = 4  # of _TILE_DEPTH, or groups, that a split has at least: adding sums takes as long as two
_MOST_PARTS = 16
_MOST_SPLITS = {True: 4, False: 16}  # of tiles with 128 rows, or fewer: one program adds them all
_arrived: dict[torch.device, Tensor] = {}


def plan_quantise_tokens(x: Tensor, values: Tensor, scales: Tensor) -> list[Launch]:
    rows, depth = x.shape
    block = min(power_of_2(depth), 8192)
    integer = values.dtype is torch.int8
    return [
        Launch(
            kernel=low_bit.quantise_tokens,
            grid=(rows,),
            arguments=(x, values, scales),
            constants={
                "DEPTH": depth,
                "STRIDE": x.stride(0),
                "BLOCK": block,
                "INTEGER": integer,
                "LEVELS": float(LEVELS) if integer else FP8_LARGEST,
                "SMALLEST": SMALLEST,
            },
            warps=min(max(block // 512, 1), 16),
        ),
    ]


def quantise_tokens(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = x if x.stride(1) == 1 else x.contiguous()
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    if x.numel():
        run_plan(plan_quantise_tokens, x, values, scales)
    return values, scales


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
    integer, unpacked = x.dtype is torch.int8, zeros is not None and x.dtype is not torch.int8
    tile_rows, tile_columns, warps, stages = (
        _unpacked_tiles(rows, columns) if unpacked else _tiles(rows, columns, integer)
    )
    grid: tuple[int, ...] = (-(-rows // tile_rows), -(-columns // tile_columns))
    tiles = grid[0] * grid[1]
    constants = {"COLUMNS": columns, "BIAS": bias is not None, "TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns}
    of_tokens, added = scales if token_scales is None else token_scales, scales if bias is None else bias

    def sums(splits: int) -> Tensor:
        if splits == 1:
            return arrived
        kind = torch.int32 if integer else torch.float32
        return torch.empty((tiles, splits, tile_rows, tile_columns), dtype=kind, device=x.device)

    arguments: tuple[Any, ...]
    if zeros is None:
        splits = splits_of(rows, columns, depth) if integer else 1
        kernel, grid = low_bit.multiply_bytes, (*grid, splits)
        arguments = x, of_tokens, weight, scales, added, out, sums(splits), arrived, rows, splits
        constants |= {"DEPTH": depth, "TILE_DEPTH": _TILE_DEPTH, "SPLIT": splits > 1, "INTEGER": integer}
    elif unpacked:
        part = groups_of_part(columns, groups)
        splits = -(-groups // part) if tiles < _SPLIT_PROGRAMS else 1
        kernel, grid = low_bit.multiply_unpacked, (*grid, splits)
        arguments = x, weight, scales, zeros, added, out, sums(splits), arrived, rows
        constants |= {"GROUPS": groups, "GROUP": depth // groups, "PART": part, "SPLIT": splits > 1}
    else:
        kernel = low_bit.multiply_nibbles
        arguments = x, of_tokens, weight, scales, zeros, added, out, rows
        constants |= {"GROUPS": groups, "GROUP": depth // groups}
    return [Launch(kernel=kernel, grid=grid, arguments=arguments, constants=constants, warps=warps, stages=stages)]


def splits_of(rows: int, columns: int, depth: int) -> int:
    """Return the parts of K that an int8 product [rows, depth] times [columns, depth] has programs of their own for."""
    tile_rows, tile_columns, *_ = _tiles(rows, columns, True)
    tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
    most = min(_SPLIT_PROGRAMS // tiles, -(-depth // _TILE_DEPTH) // _LEAST_PARTS, _MOST_SPLITS[tile_rows > 64])
    return max(most, 1)


def groups_of_part(columns: int, groups: int) -> int:
    """Return the groups whose float sums are added before those of other parts: of a matrix, whatever the rows."""
    parts = min(_SPLIT_PROGRAMS // -(-columns // _unpacked_tiles(1, columns)[1]), groups // _LEAST_PARTS, _MOST_PARTS)
    return -(-groups // max(parts, 1))


def _unpacked_tiles(rows: int, columns: int) -> tuple[int, int, int, int]:
    """(rows, columns, warps, stages) for four bits with floats. All multiply by one instruction, whose sums do not
    depend on the tile. 32 rows with 128 columns would take all registers."""
    if rows > 16:
        return 32, 64, 4, 4
    return 16, 128 if columns >= 8192 else 64, 4, 4


def _tiles(rows: int, columns: int, integer: bool) -> tuple[int, int, int, int]:
    """(rows, columns, warps, stages). For few rows or columns, smaller tiles: more programs read the weight."""
    few = 64 if columns >= 8192 else 32
    if not integer:
        return 64, few, 4, 4
    if rows > 64:
        return 128, 128, 8, 3
    return (16 if rows <= 16 else 32 if rows <= 32 else 64), few, 4, 4


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
