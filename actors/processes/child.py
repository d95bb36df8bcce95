"""The child's end: how it receives commands, and how it exits. Independent of its computation."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from actors.processes.link import Link
from actors.stacks import stacks_on_signal


@contextmanager
def parent_link(failed: type[Any]) -> Iterator[Link]:
    """Yield the link to the parent that made this process (the socket is argv[1]). The process exits with the block.

    `failed`: the event that is sent to the parent, with the reason, if the block raises; the traceback goes to stderr,
    and the exit code is then 1.
    """
    # The terminal's Ctrl-C goes to the whole process group, but the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stacks_on_signal()  # to the parent, which copies stderr to its log
    link = Link(Connection(int(sys.argv[1])))
    try:
        yield link
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        with suppress(OSError):
            link.send([failed(f"{type(error).__name__}: {error}")])
        link.close()
        os._exit(1)  # a failure whose reason was sent
    os._exit(0)  # skips interpreter shutdown: torch's thread pools may take long to end, and own nothing


def hear(link: Link, inbox: SimpleQueue[Any]) -> None:
    """Put every command into `inbox`, on a separate thread. The end of the parent ends this process at once, even in
    the middle of a computation."""

    def read() -> None:
        try:
            while True:
                inbox.put(link.receive())
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone

    threading.Thread(target=read, name="commands", daemon=True).start()
