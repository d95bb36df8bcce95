"""The flat weight buffer as a sequence of small pieces: made from tensors that arrive one by one, on their device, and
scattered into tensors elsewhere. Defines the byte order and the checksum of the pieces; callers decide where they go.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.checksum import BLOCK_BYTES, BLOCK_WORDS, digest
from models.dtypes import DTYPE_NAMES
from models.manifest import TensorSpec, aligned

HOST = torch.device("cpu")
PIECE_BYTES = 64 * 2**20  # a multiple of BLOCK_BYTES; two exist at a time
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def in_pieces(
    specs: Sequence[TensorSpec],
    total_bytes: int,
    tensors: Iterable[tuple[str, Tensor]],
    device: torch.device,
    *,
    into: _Bytes | Sequence[Tensor] | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Iterator[Tensor]:
    """Yield the buffer laid out by `specs`, as uint8 tensors of `piece_bytes` (the last may be shorter), in order.

    `tensors` must arrive in the order of `specs`; each is released before the next. A piece stays valid until the piece
    after the next is requested, because two buffers alternate. `into`: those two buffers (uint8 tensors of
    `piece_bytes` on `device`; default: allocated here), or the whole buffer on the host. Raises ValueError for
    unexpected tensors.
    """
    if isinstance(into, np.ndarray):
        whole = torch.from_numpy(into)
        rooms: Callable[[int], Tensor] = lambda index: whole[index * piece_bytes : (index + 1) * piece_bytes]  # noqa: E731
    else:
        two = into or [torch.empty(min(piece_bytes, total_bytes), dtype=torch.uint8, device=device) for _ in range(2)]
        rooms = lambda index: two[index % 2]  # noqa: E731
    index, filled, room = 0, 0, rooms(0)
    for spec, part in _bytes_of(specs, tensors):
        taken, size = 0, aligned(part.numel())
        while taken < size:
            count = min(piece_bytes - filled, size - taken)
            given = max(0, min(count, part.numel() - taken))
            room[filled : filled + given].copy_(part[taken : taken + given])
            room[filled + given : filled + count].zero_()  # the padding between tensors is part of the checksum
            filled, taken = filled + count, taken + count
            if filled == piece_bytes:
                yield room
                index, filled = index + 1, 0
                room = rooms(index)
        del spec, part  # while the next one is made
    if filled:
        yield room[:filled]


def _bytes_of(
    specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[TensorSpec, Tensor]]:
    wanted = iter(specs)
    for name, tensor in tensors:
        spec = next(wanted, None)
        if spec is None or (name, DTYPE_NAMES.get(tensor.dtype), tuple(tensor.shape)) != (
            spec.name,
            spec.dtype,
            spec.shape,
        ):
            raise ValueError(f"{name} {tensor.dtype} {list(tensor.shape)} came where {spec} was laid out")
        yield spec, tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        del tensor
    if (left := next(wanted, None)) is not None:
        raise ValueError(f"{left.name} did not come")


def to_host(pieces: Iterable[Tensor], out: _Bytes, device: torch.device) -> None:
    """Copy pieces into `out`; host pieces may be there already. From CUDA through two pinned buffers: the device fills
    one while the host empties the other."""
    if device.type != "cuda":
        end = 0
        for piece in pieces:
            end += piece.numel()
            if piece.data_ptr() != out.ctypes.data + end - piece.numel():
                torch.from_numpy(out[end - piece.numel() : end]).copy_(piece)
        return
    pinned = [torch.empty(0, dtype=torch.uint8, pin_memory=True)] * 2
    before: tuple[int, Tensor, torch.cuda.Event] | None = None
    start = 0

    def finish(copied: tuple[int, Tensor, torch.cuda.Event] | None) -> None:
        if copied is not None:
            at, held, arrived = copied
            arrived.synchronize()
            torch.from_numpy(out[at : at + held.numel()]).copy_(held)

    for index, piece in enumerate(pieces):
        if pinned[index % 2].numel() < piece.numel():
            pinned[index % 2] = torch.empty(piece.numel(), dtype=torch.uint8, pin_memory=True)
        held = pinned[index % 2][: piece.numel()]
        held.copy_(piece, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        finish(before)
        before = start, held, arrived
        start += piece.numel()
    finish(before)


def from_host(buffer: _Bytes, scatter: "Scatter", device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
    """Scatter a whole buffer into tensors on a CUDA device, through two pinned buffers: the host fills one while the
    device empties the other. Waits for the device."""
    pinned = [torch.empty(min(piece_bytes, buffer.size), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    copied: list[torch.cuda.Event | None] = [None, None]
    with warnings.catch_warnings():  # Ray's read-only buffers are only read here
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        whole = torch.from_numpy(buffer)
    for index, start in enumerate(range(0, buffer.size, piece_bytes)):
        before = copied[index % 2]
        if before is not None:
            before.synchronize()
        piece = whole[start : start + piece_bytes]
        held = pinned[index % 2][: piece.numel()]
        held.copy_(piece)
        scatter.take(held)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        copied[index % 2] = event
    torch.cuda.current_stream(device).synchronize()


class PieceSums:
    """`models.checksum.checksum` of a buffer, computed piece by piece on any device."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._columns: Tensor | None = None
        self._bytes = 0

    def add(self, piece: Tensor) -> None:
        """Add the next piece, uint8; a multiple of BLOCK_BYTES unless it is the last. Does not wait for the device."""
        if self._bytes % BLOCK_BYTES:
            raise ValueError(f"only the last piece may end within a block of {BLOCK_BYTES} bytes")
        self._bytes += piece.numel()
        rest = -piece.numel() % BLOCK_BYTES
        whole = piece if not rest else torch.cat([piece, piece.new_zeros(rest)])
        table = whole.view(torch.int64).view(-1, BLOCK_WORDS)
        self._rows.append(table.sum(1))
        columns = table.sum(0)
        self._columns = columns if self._columns is None else self._columns + columns

    def value(self) -> int:
        """Return the checksum. Waits for the device."""
        if self._columns is None:
            return digest(np.zeros(0, np.uint64), np.zeros(BLOCK_WORDS, np.uint64), 0)
        rows = torch.cat(self._rows).cpu().numpy().view(np.uint64)
        return digest(rows, self._columns.cpu().numpy().view(np.uint64), self._bytes)


class Scatter:
    """Writes pieces of a flat buffer into the tensors that it describes, in place."""

    def __init__(self, specs: Sequence[TensorSpec], targets: Mapping[str, Tensor]) -> None:
        """`targets` by name: contiguous, of the shapes and dtypes of `specs`. Raises ValueError for others."""
        self._flat: list[Tensor] = []
        self._spans: list[tuple[int, int]] = []  # of the buffer, one behind the other
        for spec in specs:
            target = targets[spec.name]
            if DTYPE_NAMES.get(target.dtype) != spec.dtype or tuple(target.shape) != spec.shape:
                raise ValueError(f"{spec.name} is {target.dtype} {list(target.shape)} here, {spec} comes")
            if not target.is_contiguous():
                raise ValueError(f"{spec.name} is not in one piece here")
            flat = target.detach().reshape(-1).view(torch.uint8)
            self._flat.append(flat)
            self._spans.append((spec.offset_bytes, spec.offset_bytes + flat.numel()))
        self._next, self._at = 0, 0

    @torch.no_grad()
    def take(self, piece: Tensor) -> None:
        """Write the next piece. On CUDA it may be reused once the current stream has reached this point."""
        start, self._at = self._at, self._at + piece.numel()
        while self._next < len(self._spans):
            begin, end = self._spans[self._next]
            if begin >= self._at:
                break
            low, high = max(begin, start), min(end, self._at)
            if high > low:
                into = self._bytes(self._next, piece.device)[low - begin : high - begin]
                into.copy_(piece[low - start : high - start], non_blocking=True)
            if end > self._at:
                break
            self._whole(self._next)
            self._next += 1

    def _bytes(self, number: int, device: torch.device) -> Tensor:
        """Where those of a tensor go."""
        return self._flat[number]

    def _whole(self, number: int) -> None:
        """All bytes of a tensor have come."""
