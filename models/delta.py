"""Difference between two buffers of weights: positions and new bits of the changed elements. Defines the encoding;
callers decide when to send one. No torch, no I/O.

A delta is one uint8 buffer: a header of 64-bit words, a table with a row for each part, then each part's positions and
values. Parts are runs of PART_ELEMENTS elements within one tensor, in the buffer's layout. A part's positions have the
smallest of these forms: gaps between changed elements in bytes or in 16-bit words, a bitmap, or none, with all elements
sent. Elements are compared as bits, so -0.0 and every NaN are preserved.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.checksum import checksum
from models.manifest import ITEM_BYTES, TensorSpec, WeightsManifest

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
R = TypeVar("R")

PART_ELEMENTS = 1 << 20
_MAGIC = 0x31305F41544C4544  # "DELTA_01"
_HEADER_WORDS, _ROW_WORDS = 8, 4
_LOOK_EVERY = 61  # samples one of this many blocks first; a prime, so that no regular shape hides between samples
_LOOK_BYTES = 4096
_THREADS_FROM_BYTES = 16 << 20


class DeltaError(ValueError):
    """The delta does not lead from the held buffer to the wanted one. Remedy: load the whole buffer."""


class Form(IntEnum):
    """How the positions of changes are written: distances in 8 or 16 bits, a bit per element, or everything."""

    SAME = 0
    GAPS8 = 1
    GAPS16 = 2
    BITMAP = 3
    WHOLE = 4


@dataclass(frozen=True, slots=True)
class Held:
    """A held buffer of weights and its manifest."""

    manifest: WeightsManifest
    buffer: Bytes


@dataclass(frozen=True, slots=True)
class _Part:
    start: int  # byte
    elements: int
    item_bytes: int

    def of(self, buffer: Bytes) -> NDArray[Any]:
        """View as unsigned integers [elements]."""
        cut = buffer[self.start : self.start + self.elements * self.item_bytes]
        return cut.view(f"u{self.item_bytes}")


@dataclass(frozen=True, slots=True)
class _Encoded:
    form: Form
    changed: int
    positions: NDArray[Any]
    values: NDArray[Any]


_NONE = np.zeros(0, np.uint8)


def share_changed(old: Bytes, new: Bytes) -> float:
    """Estimate the share of 16-bit words that differ, in [0, 1], from one 4 KiB block in 61. Reads 1/61 of both
    buffers."""
    blocks = old.size // _LOOK_BYTES
    if not blocks:
        return float(np.mean(old != new)) if old.size else 0.0
    cut = slice(0, blocks * _LOOK_BYTES)
    was, now = (buffer[cut].view(np.uint16).reshape(blocks, -1)[::_LOOK_EVERY] for buffer in (old, new))
    return float(np.mean(was != now))


def encode(old: Held, new: Held, *, limit_bytes: int) -> Bytes | None:
    """Return the delta from `old` to `new`; None if it would exceed `limit_bytes` or the layouts differ."""
    if old.manifest.tensors != new.manifest.tensors or old.manifest.total_bytes != new.manifest.total_bytes:
        return None
    parts = list(_parts(new.manifest.tensors))
    head = 8 * (_HEADER_WORDS + _ROW_WORDS * len(parts))
    if share_changed(old.buffer, new.buffer) * new.manifest.total_bytes / 2 > limit_bytes:
        return None  # each differing word has at least one changed byte, and each changed byte is sent
    total, encoded = head, []
    for one in _each(lambda part: _encode(part.of(old.buffer), part.of(new.buffer)), parts, old.buffer.size):
        encoded.append(one)
        total += one.positions.nbytes + one.values.nbytes
        if total > limit_bytes:
            return None
    out = np.empty(total, np.uint8)
    words = out[:head].view(np.uint64)
    was, now = old.manifest, new.manifest
    words[:_HEADER_WORDS] = (
        _MAGIC, was.version, was.checksum, now.version, now.checksum, now.total_bytes, len(parts), total
    )  # fmt: skip
    table, at = words[_HEADER_WORDS:].reshape(len(parts), _ROW_WORDS), head
    for row, one in zip(table, encoded, strict=True):
        row[:] = one.form, one.changed, one.positions.nbytes, one.values.nbytes
        for piece in (one.positions, one.values):
            out[at : at + piece.nbytes] = piece.view(np.uint8)
            at += piece.nbytes
    return out


def changed_elements(delta: Bytes) -> int:
    """Return the number of elements that the delta changes."""
    return int(_table(delta)[:, 1].sum())


def target(delta: Bytes, held: WeightsManifest) -> WeightsManifest:
    """Return the manifest of what the delta says that it makes of `held`. Raises DeltaError."""
    _table(delta)
    version, sum_ = (int(word) for word in delta[: 8 * _HEADER_WORDS].view(np.uint64)[3:5])
    return replace(held, version=version, checksum=sum_)


def apply(delta: Bytes, wanted: WeightsManifest, held: WeightsManifest, buffer: Bytes, *, verify: bool = True) -> None:
    """Change `buffer`, which `held` describes, in place into the one that `wanted` describes. `verify`: compare the
    result's checksum. Only the last of a chain's deltas needs it.

    Raises DeltaError. `buffer` is untouched if the delta is of other weights or damaged in its header or table.
    Otherwise it is invalid: its checksum is not the wanted one.
    """
    table = _table(delta)
    header = delta[: 8 * _HEADER_WORDS].view(np.uint64)
    leads = [int(word) for word in header[1:5]]
    if leads[2:] != [wanted.version, wanted.checksum] or int(header[5]) != wanted.total_bytes:
        raise DeltaError(f"a delta to version {leads[2]} came, wanted is version {wanted.version}")
    if leads[:2] != [held.version, held.checksum] or held.tensors != wanted.tensors or buffer.size != int(header[5]):
        raise DeltaError(f"the delta is from version {leads[0]}, held is version {held.version}")
    parts = list(_parts(wanted.tensors))
    if len(parts) != len(table):
        raise DeltaError(f"the delta has {len(table)} parts, the weights have {len(parts)}")
    ends = 8 * (_HEADER_WORDS + table.size) + np.cumsum(table[:, 2:].sum(1, dtype=np.int64))
    starts = ends - table[:, 2:].sum(1, dtype=np.int64)

    def one(number: int) -> None:
        form, changed, position_bytes, _ = (int(word) for word in table[number])
        if form == Form.SAME:
            return
        body = delta[starts[number] : ends[number]]
        _decode(form, changed, body[:position_bytes], body[position_bytes:], parts[number].of(buffer))

    for _ in _each(one, list(range(len(parts))), buffer.size):
        pass
    if verify and (found := checksum(buffer)) != wanted.checksum:
        raise DeltaError(f"the delta leads to checksum {found:#x}, wanted is {wanted.checksum:#x}")


def _parts(tensors: Sequence[TensorSpec]) -> Iterator[_Part]:
    for spec in tensors:
        count, item = math.prod(spec.shape), ITEM_BYTES[spec.dtype]
        for first in range(0, count, PART_ELEMENTS):
            yield _Part(spec.offset_bytes + first * item, min(PART_ELEMENTS, count - first), item)


def _table(delta: Bytes) -> "NDArray[np.uint64]":
    """Return rows [parts, 4]: form, changed elements, bytes of positions, bytes of values. Raises DeltaError."""
    if delta.size < 8 * _HEADER_WORDS or delta.dtype != np.uint8:
        raise DeltaError(f"a delta of {delta.size} bytes of {delta.dtype} has no header")
    header = delta[: 8 * _HEADER_WORDS].view(np.uint64)
    count, head = int(header[6]), 8 * (_HEADER_WORDS + _ROW_WORDS * int(header[6]))
    if int(header[0]) != _MAGIC or int(header[7]) != delta.size or head > delta.size:
        raise DeltaError(f"this is not a delta of {delta.size} bytes")
    table = delta[8 * _HEADER_WORDS : head].view(np.uint64).reshape(count, _ROW_WORDS)
    if (table[:, 2:] > delta.size).any() or head + int(table[:, 2:].sum()) != delta.size:
        raise DeltaError("the parts of the delta do not fill it")
    return table


def _encode(old: NDArray[Any], new: NDArray[Any]) -> _Encoded:
    differs = old != new
    changed = int(np.count_nonzero(differs))
    item = new.itemsize
    if not changed:
        return _Encoded(Form.SAME, 0, _NONE, _NONE)
    bitmap, saved = -(-new.size // 8), (new.size - changed) * item
    if bitmap < changed:  # gaps take at least one byte each
        if bitmap >= saved:
            return _Encoded(Form.WHOLE, new.size, _NONE, new)
        return _Encoded(Form.BITMAP, changed, np.packbits(differs), new[differs])
    at = np.flatnonzero(differs)
    gaps = np.diff(at, prepend=-1) - 1
    sizes = {Form.BITMAP: bitmap, Form.WHOLE: saved}
    sizes[Form.GAPS8] = changed + int((gaps // 255).sum())
    sizes[Form.GAPS16] = 2 * (changed + int((gaps // 65535).sum()))
    match min(sizes, key=lambda form: (sizes[form], form)):
        case Form.WHOLE:
            return _Encoded(Form.WHOLE, new.size, _NONE, new)
        case Form.BITMAP:
            return _Encoded(Form.BITMAP, changed, np.packbits(differs), new[at])
        case form:
            return _Encoded(form, changed, _coded(gaps, np.dtype("u1" if form is Form.GAPS8 else "<u2")), new[at])


def _coded(gaps: "NDArray[np.int64]", word: np.dtype[Any]) -> NDArray[Any]:
    """Encode each gap as copies of the largest word, then the remainder, which is smaller than the largest word."""
    most = (1 << 8 * word.itemsize) - 1
    longs, left = np.divmod(gaps, most)
    ends = np.cumsum(longs + 1) - 1
    out = np.full(int(ends[-1]) + 1, most, word)
    out[ends] = left
    return out


def _decode(form: int, changed: int, positions: Bytes, values: Bytes, target: NDArray[Any]) -> None:
    """Decode one part into `target`. Raises DeltaError before writing anything of this part."""
    item = target.itemsize
    if values.size != changed * item:
        raise DeltaError(f"{values.size} bytes came for {changed} elements of {item} bytes")
    new = np.frombuffer(values.tobytes(), target.dtype)  # it may start at any byte
    match form:
        case Form.WHOLE:
            if changed != target.size or positions.size:
                raise DeltaError(f"{changed} elements came for all {target.size}")
            target[:] = new
        case Form.BITMAP:
            if positions.size != -(-target.size // 8):
                raise DeltaError(f"a bitmap of {positions.size} bytes came for {target.size} elements")
            differs = np.unpackbits(positions, count=target.size).view(bool)
            if np.count_nonzero(differs) != changed:
                raise DeltaError(f"the bitmap has not {changed} elements")
            target[differs] = new
        case Form.GAPS8 | Form.GAPS16:
            word = np.dtype("u1" if form == Form.GAPS8 else "<u2")
            if positions.size % word.itemsize:
                raise DeltaError(f"{positions.size} bytes are no whole number of words")
            words = np.frombuffer(positions.tobytes(), word)
            ends = np.flatnonzero(words != (1 << 8 * word.itemsize) - 1)
            if ends.size != changed:
                raise DeltaError(f"{ends.size} positions came for {changed} elements")
            at = np.cumsum(words, dtype=np.int64)[ends] + np.arange(changed)
            if changed and int(at[-1]) >= target.size:
                raise DeltaError(f"position {at[-1]} is beyond {target.size} elements")
            target[at] = new
        case _:
            raise DeltaError(f"no part has the form {form}")


def _each(work: Callable[[Any], R], items: Sequence[Any], total_bytes: int) -> Iterator[R]:
    """Yield results in order; on several threads for much data, since numpy releases the interpreter lock while
    comparing."""
    threads = min(os.cpu_count() or 1, 8)
    if threads == 1 or total_bytes < _THREADS_FROM_BYTES:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        for start in range(0, len(items), 4 * threads):  # a caller that stops leaves the rest uncomputed
            yield from pool.map(work, items[start : start + 4 * threads])
