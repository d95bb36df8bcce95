"""Arrays over a socket as memory without a name."""

import gc
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from actors.processes.link import APART_BYTES, Link, share_bytes, shared_bytes


def pair() -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    return Link(Connection(ours.detach())), Link(Connection(theirs.detach()))


def test_shared_bytes_round_trip() -> None:
    data = np.arange(1000, dtype=np.uint8)
    shared = shared_bytes(share_bytes(data), 1000)
    data[:] = 0
    assert shared.tolist() == [i % 256 for i in range(1000)]
    assert shared_bytes(share_bytes(np.zeros(0, np.uint8)), 0).size == 0


def test_buffers_lie_at_multiples_of_64_bytes() -> None:
    shared = shared_bytes(share_bytes(np.full(3, 1, np.uint8), np.full(65, 2, np.uint8)), 192)
    assert shared[:3].tolist() == [1] * 3
    assert shared[64:129].tolist() == [2] * 65


ARRAYS = arrays(
    st.sampled_from([np.int32, np.uint8, np.float64, np.bool_]), array_shapes(min_dims=1, max_dims=2, max_side=40)
)


@given(st.lists(ARRAYS, max_size=5), st.integers(1, 4096))
def test_arrays_come_as_they_were_wherever_they_travel(sent: list[Any], apart_bytes: int) -> None:
    ours, theirs = pair()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.processes.link.APART_BYTES", apart_bytes)
        ours.send({"all": sent, "each": [(array.T, array[::2]) for array in sent]})
        received = theirs.receive()
    for array, back, (turned, every_second) in zip(sent, received["all"], received["each"], strict=True):
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert (turned.shape, turned.tobytes()) == (array.T.shape, array.T.tobytes())
        assert every_second.tobytes() == array[::2].tobytes()
        assert back.flags.writeable
    ours.close()
    theirs.close()


def test_read_only_arrays_become_writable_copies() -> None:
    ours, theirs = pair()
    for size in (10, APART_BYTES):
        given_ = np.zeros(size, np.uint8)
        given_.flags.writeable = False
        ours.send(given_)
        theirs.receive()[:] = 1
        assert not given_.any()
    ours.close()
    theirs.close()


def test_memory_stays_with_its_message_whoever_sends() -> None:
    gc.collect()  # What earlier tests left open.
    ours, theirs = pair()
    before = psutil.Process().num_fds()

    def send(value: int) -> None:
        for size in range(50):
            ours.send(("array", value, np.full(APART_BYTES + size, value, np.uint8)))
            ours.send(("none", value, size))

    threads = [threading.Thread(target=send, args=(value,)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for _ in range(3 * 100):
        kind, value, memory = theirs.receive()
        assert isinstance(memory, np.ndarray) == (kind == "array")
        if kind == "array":
            assert (memory == value).all()
            assert APART_BYTES <= memory.size < APART_BYTES + 50
        del memory
    for thread in threads:
        thread.join()
    assert psutil.Process().num_fds() <= before
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    with pytest.raises(OSError, match=r"."):
        theirs.send(np.zeros(APART_BYTES, np.uint8))
    theirs.close()
    assert psutil.Process().num_fds() <= before - 2
