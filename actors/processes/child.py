"""The child's end: how it hears its parent, and how it ends. Never knows what it computes."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from actors.processes.link import Link


def run_child(serve: Callable[[Link], None], failed: Callable[[str], object]) -> NoReturn:
    """Serve the parent that made this process (the socket is argv[1]), and exit.

    `failed(reason)` makes the event that the parent is told if `serve` raises; the traceback goes to stderr, and the
    exit code is then 1.
    """
    # The terminal's Ctrl-C goes to the whole process group; when to stop is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = Link(Connection(int(sys.argv[1])))
    try:
        serve(link)
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        with suppress(OSError):
            link.send([failed(f"{type(error).__name__}: {error}")])
        link.close()
        os._exit(1)  # Marks a failure that told its reason.
    os._exit(0)  # Not through interpreter shutdown: torch's thread pools may take long to end, and own nothing.


def hear(link: Link, put: Callable[[Any], None]) -> None:
    """Hand every command to `put`, on a thread of its own. The parent's end ends this process at once, in the middle of
    a computation if need be: the socket is its lifeline."""

    def read() -> None:
        try:
            while True:
                put(link.receive())
        except (EOFError, OSError):
            os._exit(0)  # The parent is gone; nobody is left to tell.

    threading.Thread(target=read, name="commands", daemon=True).start()
