"""Layout of a step's small arrays in the device's one step buffer: positions and padding.

Arrays are contiguous except for alignment, with block tables last and by columns. A step's data is thus one contiguous
range, whatever the maximal width of the tables. In a graph's layout every address is a function of the graph alone.
Rows are packed, followed by padding rows. Those write their K/V into the trash block, belong to no request, so that
attention gives zeros, and draw unused tokens greedily.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.batch.step.types import StepRows
from models.manifest import aligned
from models.ops.triton.work import WorkList

_NO_ROWS = np.zeros(1, np.int32)
RESERVED_BLOCKS = 1  # behind those that the scheduler hands out: where rows of nobody write
Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """The T rows of a step, N of which are drawn from, of B requests, as tensors on the device."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    kv_slots: Tensor  # int64 [T], where each row's K/V go
    query_offsets: Tensor  # int32 [B + 1]
    context_lens: Tensor  # int32 [B], with this step's rows
    block_tables: Tensor  # int32 [B, M], by columns
    noise_keys: Tensor  # int64 [N]
    noise_positions: Tensor  # int64 [N]
    temperature: Tensor  # float32 [N]
    top_k: Tensor | None  # int64 [N]; with top_p, or both None: nothing is truncated
    top_p: Tensor | None  # float32 [N]
    sample_rows: Tensor | None  # int64 [N]; None: N = T
    tree_mask: Tensor | None  # uint8 [T, W], see ops.paged_attention
    max_query: int
    max_context: int
    work: Tensor | None = None  # of attention: see models.ops.triton.work


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The shapes that determine a layout."""

    requests: int
    rows: int
    draws: int
    blocks: int  # columns of the block tables
    most: int  # rows of one request
    max_context: int
    mask_width: int = 0  # 0: no mask
    truncated: bool = False
    picked: bool = False  # sample_rows are given

    @classmethod
    def of(cls, step: StepRows, block_tokens: int) -> "StepShape":
        """Return the exact shape of a step, for eager steps."""
        arrays = step.arrays
        requests, blocks = arrays["block_tables"].shape
        mask = arrays.get("tree_mask")
        return cls(
            requests=requests,
            rows=len(arrays["tokens"]),
            draws=step.sampled,
            blocks=blocks,
            most=step.most,
            max_context=blocks * block_tokens,
            mask_width=0 if mask is None else mask.shape[1],
            truncated=step.truncated,
            picked="sample_rows" in arrays,
        )


Part = tuple[str, type[np.generic], tuple[int, ...], Any]  # name, dtype, shape, padding value


class Layout:
    """Positions of arrays in one buffer, in order and aligned."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = {name: (dtype, size, fill) for name, dtype, size, fill in parts}
        self._offsets: dict[str, int] = {}
        self.size_bytes = 0
        for name, dtype, size, _ in parts:
            self._offsets[name] = self.size_bytes
            self.size_bytes += aligned(prod(size) * np.dtype(dtype).itemsize)

    def host(self, memory: NDArray[np.uint8]) -> dict[str, Array]:
        """Return the arrays as views of a host buffer."""
        views = {}
        for name, (dtype, size, _) in self._parts.items():
            start = self._offsets[name]
            length = prod(size) * np.dtype(dtype).itemsize
            views[name] = memory[start : start + length].view(dtype).reshape(size)
        return views

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """Return the arrays as views of a device buffer."""
        views = {}
        for name, (dtype, size, _) in self._parts.items():
            start = self._offsets[name]
            length = prod(size) * np.dtype(dtype).itemsize
            views[name] = memory[start : start + length].view(getattr(torch, dtype.__name__)).view(size)
        return views


class StepLayout(Layout):
    """The places of one shape's arrays, and what padding holds there. work: attention takes a list of its work."""

    def __init__(self, shape: StepShape, trash_slot: int, block_tokens: int, work: WorkList | None = None) -> None:
        self.shape, self._work = shape, work
        rows, draws, requests = shape.rows, shape.draws, shape.requests
        trash = trash_slot + np.arange(rows) % block_tokens
        parts: list[Part] = [
            ("tokens", np.int64, (rows,), 0),
            ("positions", np.int64, (rows,), 0),
            ("kv_slots", np.int64, (rows,), trash),
            ("noise_keys", np.int64, (draws,), 0),
            ("noise_positions", np.int64, (draws,), 0),
            ("temperature", np.float32, (draws,), 0.0),
            ("query_offsets", np.int32, (requests + 1,), None),  # padding repeats the last offset
            ("context_lens", np.int32, (requests,), 0),
        ]
        if shape.truncated:
            parts += [("top_k", np.int64, (draws,), 0), ("top_p", np.float32, (draws,), 1.0)]
        if shape.picked:
            parts.append(("sample_rows", np.int64, (draws,), 0))
        if shape.mask_width:
            parts.append(("tree_mask", np.uint8, (rows, shape.mask_width), 0))
        if work is not None:
            parts.append(("work", np.int32, (work.size(requests, rows, shape.most),), 0))
        parts.append(("block_tables", np.int32, (shape.blocks, requests), 0))
        super().__init__(parts)

    def device(self, memory: Tensor) -> DeviceStep:
        """Return the arrays as views of a device buffer."""
        views: dict[str, Any] = dict.fromkeys(("top_k", "top_p", "sample_rows", "tree_mask"))
        views |= self.tensors(memory)
        tables = views.pop("block_tables").t()
        return DeviceStep(**views, block_tables=tables, max_query=self.shape.most, max_context=self.shape.max_context)

    def write(self, views: Mapping[str, Array], step: StepRows | None) -> int:
        """Write the step's arrays, or only padding, into `views` of `host`; return the number of used bytes."""
        arrays: Mapping[str, Array] = {} if step is None else step.arrays
        for name, view in views.items():
            if name in ("block_tables", "work"):
                continue
            given = arrays.get(name)
            count = 0 if given is None else len(given)
            if given is not None and given.ndim > 1:
                view[:count, : given.shape[1]] = given
                continue  # masks of padding rows and columns behind a request's own rows are not read
            if given is not None:
                view[:count] = given
            if count < len(view):
                fill = self._parts[name][2]
                if fill is None:
                    view[count:] = view[count - 1] if count else 0
                elif isinstance(fill, np.ndarray):
                    view[count:] = fill[count:]
                else:
                    view[count:] = fill
        if self._work is not None:
            # Of nobody's rows there is none.
            offsets, contexts = arrays.get("query_offsets", _NO_ROWS), arrays.get("context_lens", _NO_ROWS[:0])
            self._work.write(views["work"], offsets, contexts, tree="tree_mask" in arrays)
        tables, used = arrays.get("block_tables"), self._offsets["block_tables"]
        if tables is None:
            return used
        requests, blocks = len(tables), int(tables.shape[1])
        views["block_tables"][:blocks, :requests] = tables.T
        return used + blocks * self.shape.requests * 4
