"""Arrays over a socket as memory without a name."""

import gc
import socket
import threading
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pytest

from actors.processes.link import Link, share_bytes, shared_bytes


def pair() -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    return Link(Connection(ours.detach())), Link(Connection(theirs.detach()))


def test_shared_bytes_round_trip() -> None:
    data = np.arange(1000, dtype=np.uint8)
    shared = shared_bytes(share_bytes(data), 1000)
    data[:] = 0
    assert shared.tolist() == [i % 256 for i in range(1000)]
    assert shared_bytes(share_bytes(np.zeros(0, np.uint8)), 0).size == 0


def test_memory_stays_with_its_message_whoever_sends() -> None:
    gc.collect()  # What earlier tests left open.
    ours, theirs = pair()
    before = psutil.Process().num_fds()

    def send(value: int) -> None:
        for size in range(50):
            ours.send(("array", value, size), np.full(size, value, np.uint8))
            ours.send(("none", value, size))

    threads = [threading.Thread(target=send, args=(value,)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for _ in range(3 * 100):
        (kind, value, size), memory = theirs.receive()
        assert (memory is None) == (kind == "none")
        if memory is not None:
            assert memory.tolist() == [value] * size
        del memory
    for thread in threads:
        thread.join()
    assert psutil.Process().num_fds() <= before
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    with pytest.raises(OSError, match=r"."):
        theirs.send("x", np.zeros(4, np.uint8))
    theirs.close()
    assert psutil.Process().num_fds() <= before - 2
