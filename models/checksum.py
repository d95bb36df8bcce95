"""Checksum of weights: 64 bits over flat memory, computed at memory speed. No torch, no I/O.

A device computes the same (`models.pieces`). The memory, padded with zeros, is a table of 64-bit words, BLOCK_WORDS per
row. The checksum is a hash of the sums (modulo 2^64) of all rows and of all columns. A single changed word always
changes a sum; so do two swapped words and another length. It guards against damage and mix-ups, not against an
adversary.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_WORDS = 8192
BLOCK_BYTES = 8 * BLOCK_WORDS
_ROWS = 32  # summed both ways while cached
_SHARE_BYTES = 64 * 2**20  # minimum per thread

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Sums = NDArray[np.uint64]


def checksum(buffer: Bytes) -> int:
    """Return the checksum of the whole buffer (uint8, one dimension)."""
    flat = np.ascontiguousarray(buffer)
    shares = max(1, min(os.cpu_count() or 1, 8, flat.size // _SHARE_BYTES))
    bounds = [BLOCK_BYTES * (flat.size // BLOCK_BYTES * i // shares) for i in range(shares)] + [flat.size]
    parts = _in_threads(shares, lambda i: block_sums(flat[bounds[i] : bounds[i + 1]]))
    columns = parts[0][1].copy()
    for _, more in parts[1:]:
        columns += more
    return digest(np.concatenate([rows for rows, _ in parts]), columns, flat.size)


def block_sums(part: Bytes) -> tuple[Sums, Sums]:
    """Return the sums of the rows and of the columns [BLOCK_WORDS] of memory that starts at a row."""
    whole = part.size // BLOCK_BYTES
    if whole * BLOCK_BYTES < part.size:
        tail = np.zeros(BLOCK_BYTES, np.uint8)
        tail[: part.size - whole * BLOCK_BYTES] = part[whole * BLOCK_BYTES :]
        last = tail.view(np.uint64)
    else:
        last = None
    table = part[: whole * BLOCK_BYTES].view(np.uint64).reshape(whole, BLOCK_WORDS)
    rows, columns = np.zeros(whole + (last is not None), np.uint64), np.zeros(BLOCK_WORDS, np.uint64)
    for start in range(0, whole, _ROWS):
        block = table[start : start + _ROWS]
        rows[start : start + len(block)] = block.sum(1)
        columns += block.sum(0)
    if last is not None:
        rows[whole] = last.sum()
        columns += last
    return rows, columns


def digest(rows: Sums, columns: Sums, total_bytes: int) -> int:
    """Return the checksum of memory of this size from the row and column sums of all its parts, in order."""
    state = blake2b(total_bytes.to_bytes(8, "little"), digest_size=8)
    state.update(np.ascontiguousarray(rows, "<u8").data)
    state.update(np.ascontiguousarray(columns, "<u8").data)
    return int.from_bytes(state.digest(), "little")


def _in_threads(count: int, work: Callable[[int], tuple[Sums, Sums]]) -> list[tuple[Sums, Sums]]:
    """Run on threads: numpy releases the interpreter lock while it sums."""
    if count == 1:
        return [work(0)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))
