"""The stacks of a process that hangs: SIGUSR1 writes those of all its threads, and the process goes on.

`faulthandler` writes them in the signal's own handler, so also while a thread computes without giving up the GIL. A
child of user code (`actors.processes.user_main`), which imports nothing of Paceline, does the same by itself.
"""

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STDERR = 2


def stacks_on_signal(descriptor: int = STDERR) -> None:
    """Let SIGUSR1 write the stacks to `descriptor`, which must stay open. From any thread."""
    faulthandler.register(signal.SIGUSR1, descriptor)


@contextmanager
def stacks_into(path: Path) -> Iterator[None]:
    """Inside the block SIGUSR1 appends the stacks to `path`, unless this process has a handler of its own."""
    if signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
        yield
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    stacks_on_signal(descriptor)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        os.close(descriptor)
