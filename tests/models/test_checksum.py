"""The check of weights: which damage it finds, and that a device, threads and pieces give the same number."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models import checksum as module
from models.checksum import BLOCK_BYTES, BLOCK_WORDS, checksum
from models.pieces import PieceSums

SIZES = [0, 1, 64, BLOCK_BYTES - 8, BLOCK_BYTES, BLOCK_BYTES + 64, 70 * BLOCK_BYTES + 128]


def memory(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_pieces_on_a_device_give_the_number_of_the_whole_buffer(size: int) -> None:
    buffer = memory(size)
    for piece in (BLOCK_BYTES, 3 * BLOCK_BYTES, 128 * BLOCK_BYTES):
        sums = PieceSums()
        for start in range(0, size, piece):
            sums.add(torch.from_numpy(buffer[start : start + piece]))
        assert sums.value() == checksum(buffer)


def test_threads_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = memory(70 * BLOCK_BYTES + 128)
    alone = checksum(buffer)
    monkeypatch.setattr(module, "_SHARE_BYTES", 5 * BLOCK_BYTES)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert checksum(buffer) == alone


@given(st.integers(0, 2**31), st.integers(0, 4 * BLOCK_BYTES - 1), st.integers(1, 255))
def test_one_damaged_byte_anywhere_is_found(seed: int, at: int, change: int) -> None:
    buffer = memory(4 * BLOCK_BYTES, seed)
    before = checksum(buffer)
    buffer[at] ^= change
    assert checksum(buffer) != before


@given(st.integers(0, 4 * BLOCK_WORDS - 1), st.integers(0, 4 * BLOCK_WORDS - 1))
def test_two_words_that_swapped_are_found(first: int, second: int) -> None:
    words = memory(4 * BLOCK_BYTES).view(np.uint64)
    before = checksum(words.view(np.uint8))
    words[[first, second]] = words[[second, first]]
    assert (checksum(words.view(np.uint8)) == before) is (first == second)


def test_zeros_of_another_length_and_rows_that_swapped_are_found() -> None:
    assert checksum(np.zeros(64, np.uint8)) != checksum(np.zeros(128, np.uint8))
    buffer = memory(4 * BLOCK_BYTES)
    rows = buffer.reshape(4, BLOCK_BYTES)
    assert checksum(rows[[1, 0, 2, 3]].reshape(-1)) != checksum(buffer)


def test_only_the_last_piece_may_be_ragged() -> None:
    sums = PieceSums()
    sums.add(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="only the last piece"):
        sums.add(torch.zeros(8, dtype=torch.uint8))
