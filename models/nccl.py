"""NCCL groups whose process survives the loss of a member: how they are created and aborted. No collectives.

By default torch ends the process. Its watchdog does so when a collective is late or fails, and its monitor when the
watchdog hangs, as it may while a broken communicator is torn down. Both are switched off for groups created here. Their
owner polls its collectives and calls `abort_group` when one is late. Until then the collective's kernel spins on the
device.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_LOG = logging.getLogger(__name__)
# Read when a group is constructed. 2: clean up a failed communicator, keep the process.
_SURVIVES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_construction = threading.Lock()


def has_nccl() -> bool:
    """Return whether this torch has NCCL."""
    return dist.is_nccl_available()


def nccl_group(store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """Return a connected group of `size` members on one device each. Raises RuntimeError if they cannot be connected.

    Blocks until all have joined, and cannot be interrupted: call it in a thread."""
    with _construction, _environment():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    try:
        torch.cuda.set_device(device)  # for this thread
        group.eager_connect_single_device(device)  # else the first collective would, in the caller's main thread
    except RuntimeError:
        abort_group(group)
        raise
    return group


def abort_group(group: Any, after_s: float = 0.0) -> threading.Event:
    """Abort the group and any hanging collective; the returned event is set when done. Do not use the group afterwards.

    Returns at once: torch waits up to the group's timeout for NCCL, in a separate thread here. `after_s`: delay for
    other members, which may still read this one's part of a collective that is complete here."""
    done = threading.Event()

    def end() -> None:
        try:
            time.sleep(after_s)
            group.abort()
        except (RuntimeError, AttributeError) as error:
            _LOG.warning("an NCCL group could not be aborted, its memory is lost: %s", error)
        finally:
            done.set()

    threading.Thread(target=end, name="abort", daemon=True).start()
    return done


@contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _SURVIVES}
    os.environ.update(_SURVIVES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
