"""Launch the kernels of low-bit products by the rules of `launch`: plans depend on shapes and dtypes.

Integer products choose their tile by the number of rows, since no bit depends on it; the others have one tile.
"""

import torch
from torch import Tensor

from models.low_bit import FP8_LARGEST, LEVELS
from models.ops.low_bit_reference import SMALLEST
from models.ops.triton import low_bit
from models.ops.triton.direct import Launch, run_plan
from models.ops.triton.launch import power_of_2

_TILE_DEPTH = 128  # bytes of a contiguous part of a row; divides every matrix of Qwen2.5


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
) -> list[Launch]:
    """The dtypes tell the format: int8 by int8, fp8 by fp8, int8 by nibbles, or floats by nibbles."""
    rows, depth = x.shape
    columns, groups = scales.shape
    integer = x.dtype is torch.int8
    tile_rows, tile_columns, warps, stages = _tiles(rows, columns, integer)
    shared = {"COLUMNS": columns, "BIAS": bias is not None, "INTEGER": integer}
    tile = {"TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns}
    grid = -(-rows // tile_rows), -(-columns // tile_columns)
    of_tokens = scales if token_scales is None else token_scales
    added = scales if bias is None else bias
    if zeros is None:
        return [
            Launch(
                kernel=low_bit.multiply_bytes,
                grid=grid,
                arguments=(x, of_tokens, weight, scales, added, out, rows),
                constants=shared | tile | {"DEPTH": depth, "TILE_DEPTH": _TILE_DEPTH},
                warps=warps,
                stages=stages,
            ),
        ]
    return [
        Launch(
            kernel=low_bit.multiply_nibbles,
            grid=grid,
            arguments=(x, of_tokens, weight, scales, zeros, added, out, rows),
            constants=shared | tile | {"GROUPS": groups, "GROUP": depth // groups},
            warps=warps,
            stages=stages,
        ),
    ]


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
        run_plan(plan_low_bit_linear, x, token_scales, weight, scales, zeros, bias, out)
    return out
