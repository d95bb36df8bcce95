"""The inputs and outputs of a draft: regions of one upload and of one download, at fixed addresses.

Owns the buffers and their layout; fills them from numpy arrays; computes nothing. Frames with captured graphs share one
buffer that never moves, others get one that grows. A frame's unused requests are padding: no rows, and cache slots that
are never read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter.eagle.shapes import DraftShape
from models.manifest import aligned
from models.staging import Download, Upload

Int64Array = NDArray[np.int64]
Sizes = list[tuple[str, type[np.generic], tuple[int, ...]]]
_OF_DRAWS: dict[str, type[np.generic]] = {
    "keys": np.int64,
    "noise_positions": np.int64,
    "top_k": np.int64,
    "temperature": np.float32,
    "divisor": np.float32,  # the temperature, or 1 where it is 0
    "top_p": np.float32,
}
_DTYPES: dict[type[np.generic], torch.dtype] = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a frame: number of requests, rows to catch up, and the draft after them (None: no draft)."""

    requests: int
    rows: int
    shape: DraftShape | None


def _requests(requests: int) -> Sizes:
    return [
        ("ready", np.int64, (requests,)),
        ("last", np.int64, (requests,)),
        ("lens", np.int32, (requests,)),
        ("offsets", np.int32, (requests + 1,)),
    ]


def _rows(rows: int) -> Sizes:
    return [(name, np.int64, (rows,)) for name in ("picked", "tokens", "positions", "slots")]


def _draft(shape: DraftShape | None) -> Sizes:
    if shape is None:
        return []
    passes, draws = max(shape.levels - 1, 0), shape.all_draws
    return [
        ("row_positions", np.int64, (shape.all_rows,)),
        ("row_slots", np.int64, (shape.all_rows,)),
        ("level_lens", np.int32, (passes, shape.requests)),
        ("level_offsets", np.int32, (passes, shape.requests + 1)),
        *((name, dtype, (draws,)) for name, dtype in _OF_DRAWS.items()),
    ]


def _bytes(sizes: Sizes) -> int:
    return sum(_region_bytes(dtype, shape) for _, dtype, shape in sizes)


def _region_bytes(dtype: type[np.generic], shape: tuple[int, ...]) -> int:
    return aligned(int(np.prod(shape)) * np.dtype(dtype).itemsize)


class Frame:
    """One size's regions. `tensors` are on the device, valid until the next upload; `begin`, fill, `send`."""

    def __init__(self, size: Size, upload: Upload, columns: int, draft_bytes: int) -> None:
        """columns: of the block tables, which come last and column by column, so that only used ones are sent.
        draft_bytes: space for the draft, so that the tables have the same address in all frames."""
        self.size, self._upload = size, upload
        places: dict[str, tuple[int, type[np.generic], tuple[int, ...]]] = {}
        start = 0
        for sizes in (_requests(size.requests), _rows(size.rows), _draft(size.shape)):
            for name, dtype, shape in sizes:
                places[name] = start, dtype, shape
                start += _region_bytes(dtype, shape)
        self._tables = start + draft_bytes - _bytes(_draft(size.shape))
        places["tables"] = self._tables, np.int32, (columns, size.requests)
        self.tensors = {name: _device_view(upload.device, *place) for name, place in places.items()}
        self.tensors["tables"] = self.tensors["tables"].t()
        self._hosts = [{name: _host_view(host, *place) for name, place in places.items()} for host in upload.hosts]
        self._draft: dict[int, dict[str, Tensor]] = {}

    def begin(self) -> Mapping[str, NDArray[np.generic]]:
        """Return the regions, which must be written completely; tables [columns, requests] as far as they are used."""
        return self._hosts[self._upload.begin()]

    def send(self, columns: int) -> None:
        """Copy the regions, and `columns` columns of the tables."""
        self._upload.send(self._tables + columns * self.size.requests * 4)

    def draft(self, level: int) -> dict[str, Tensor]:
        """Return the inputs of a level's draws, and of the pass before them."""
        if level not in self._draft:
            shape, tensors = self.size.shape, self.tensors
            assert shape is not None
            found = {name: tensors[name][shape.draws(level)] for name in _OF_DRAWS}
            if level:
                found["positions"], found["slots"] = (
                    tensors[f"row_{name}"][shape.rows(level)] for name in ("positions", "slots")
                )
                found["lens"], found["offsets"] = (tensors[f"level_{name}"][level - 1] for name in ("lens", "offsets"))
            self._draft[level] = found
        return self._draft[level]


def _host_view(
    host: NDArray[np.uint8], start: int, dtype: type[np.generic], shape: tuple[int, ...]
) -> NDArray[np.generic]:
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return host[start : start + count].view(dtype).reshape(shape)


def _device_view(device: Tensor, start: int, dtype: type[np.generic], shape: tuple[int, ...]) -> Tensor:
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return device[start : start + count].view(_DTYPES[dtype]).view(shape)


class Frames:
    """Frames by size, for block tables of `columns` columns on `device`."""

    def __init__(self, device: torch.device, columns: int) -> None:
        self._device, self._columns = device, columns
        self._planned: dict[Size, Frame] = {}
        self._others: dict[Size, Frame] = {}
        self._spare: Upload | None = None

    def plan(self, sizes: Iterable[Size]) -> None:
        """Place these sizes in one fixed buffer. Equal requests and rows share the addresses of the catch-up. Earlier
        planned frames become invalid."""
        sizes = list(sizes)
        draft_bytes: dict[tuple[int, int], int] = {}
        for size in sizes:
            key = size.requests, size.rows
            draft_bytes[key] = max(draft_bytes.get(key, 0), _bytes(_draft(size.shape)))
        largest = max((self._total(size, draft_bytes[size.requests, size.rows]) for size in sizes), default=0)
        upload = _upload(largest, self._device)
        self._planned = {
            size: Frame(size, upload, self._columns, draft_bytes[size.requests, size.rows]) for size in sizes
        }

    def planned(self, size: Size) -> Frame | None:
        return self._planned.get(size)

    def of(self, size: Size) -> Frame:
        """Return a planned frame, or one that is valid until a larger one is requested."""
        frame = self._planned.get(size) or self._others.get(size)
        if frame is None:
            own = _bytes(_draft(size.shape))
            needed = self._total(size, own)
            if self._spare is None or self._spare.device.shape[0] < needed:
                self._spare = _upload(2 * needed, self._device)
                self._others.clear()
            frame = self._others[size] = Frame(size, self._spare, self._columns, own)
        return frame

    def _total(self, size: Size, draft_bytes: int) -> int:
        tables = _region_bytes(np.int32, (self._columns, size.requests))
        return _bytes(_requests(size.requests)) + _bytes(_rows(size.rows)) + draft_bytes + tables


def _upload(size_bytes: int, device: torch.device) -> Upload:
    upload = Upload(size_bytes, device)
    for host in upload.hosts:
        host.fill(0)
    return upload


def _three(words: Tensor, requests: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """View int32 words as int64, int64 and float32 [requests, nodes]."""
    size, count = (requests, nodes), requests * nodes
    return (
        words[: 2 * count].view(torch.int64).view(size),
        words[2 * count : 4 * count].view(torch.int64).view(size),
        words[4 * count : 5 * count].view(torch.float32).view(size),
    )


class Outputs:
    """Output buffers for drafts of any of `shapes`. The host reads int64 tokens and parents and float32 scores. Float32
    distributions of chains over `vocab` tokens (0: none), and all nodes of trees, stay on the device."""

    def __init__(self, shapes: set[DraftShape], vocab: int, device: torch.device) -> None:
        self._nodes = max((shape.requests * shape.nodes for shape in shapes), default=0)
        chained = max((shape.requests * shape.levels for shape in shapes if shape.k == 1), default=0)
        self._vocab = vocab
        self._words = torch.zeros(5 * self._nodes, dtype=torch.int32, device=device)
        self._soft = torch.zeros(chained * vocab, device=device)
        grown = max((shape.requests * shape.all_candidates for shape in shapes if shape.k > 1), default=0)
        self._grown = torch.zeros(5 * grown, dtype=torch.int32, device=device)
        self._download = Download(5 * self._nodes, device)

    def hold(self, shape: DraftShape) -> bool:
        """Whether the buffers have room for drafts of that shape."""
        soft = shape.requests * shape.levels * self._vocab if shape.k == 1 else 0
        grown = 5 * shape.requests * shape.all_candidates if shape.k > 1 else 0
        return shape.requests * shape.nodes <= self._nodes and soft <= len(self._soft) and grown <= len(self._grown)

    def of(self, shape: DraftShape) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, parents and scores of that shape, [requests, nodes], on the device."""
        return _three(self._words, shape.requests, shape.nodes)

    def nodes(self, shape: DraftShape) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same for all nodes that the tree had, [requests, candidates]."""
        return _three(self._grown, shape.requests, shape.all_candidates)

    def soft(self, shape: DraftShape) -> Tensor:
        """Return the distributions of that shape, [levels, requests, V]."""
        count = shape.levels * shape.requests * self._vocab
        return self._soft[:count].view(shape.levels, shape.requests, self._vocab)

    def fetch(self, shape: DraftShape) -> tuple[Int64Array, Int64Array, NDArray[np.float32]]:
        """Return the values of `of` on the host, by one copy and one wait; valid until the next call."""
        size = shape.requests, shape.nodes
        count = shape.requests * shape.nodes
        words = self._download.fetch(self._words[: 5 * count])
        return (
            words[: 2 * count].view(np.int64).reshape(size),
            words[2 * count : 4 * count].view(np.int64).reshape(size),
            words[4 * count : 5 * count].view(np.float32).reshape(size),
        )
