"""Shared parts of all process groups: gloo groups over hosts, and polling of collectives instead of unbounded waits.

`models.nccl` makes the groups between devices."""

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_SLICE_S = 0.05


def gloo_group(store: Any, rank: int, size: int, host: str, timeout_s: float) -> Any:
    """Return a group of `size` members over hosts; `host` is this host's address for the others.

    Blocks until all members have joined. Raises RuntimeError."""
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    gloo._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, rank, size, gloo)


def finished(work: Any, *, on_devices: bool) -> bool:
    """Return whether a collective is done, waiting at most a moment. Raises RuntimeError if it has failed."""
    if on_devices:
        if not work.is_completed():  # also True once it has failed
            time.sleep(0.0005)
            return False
        work.wait(timedelta(seconds=_SLICE_S))  # NCCL raises the error only with a timeout
        return True
    with suppress(RuntimeError):  # not done yet; or failed, as checked below
        work.wait(timedelta(seconds=_SLICE_S))
    if not work.is_completed():
        return False
    work.wait()
    return True
