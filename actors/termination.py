"""Call a function on SIGTERM in a Ray actor.

Ray's own handler makes an asynchronous actor refuse calls and then wait for running ones: an actor with an endless
event stream would hang for ever. Only the main thread may install another handler with `signal`, and such an actor
never runs there. `faulthandler` works from any thread: it writes to a descriptor, from which a thread reads.
"""

import faulthandler
import os
import signal
import threading
from collections.abc import Callable


def on_sigterm(told: Callable[[], None]) -> None:
    """Let SIGTERM call `told`, on a separate thread, and do nothing else; once per process."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    faulthandler.register(signal.SIGTERM, writing, all_threads=False, chain=False)

    def wait() -> None:
        os.read(reading, 1)
        told()

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
