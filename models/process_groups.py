"""What every process group of ours shares, whatever it carries: gloo groups over hosts, and collectives that are polled
and never waited for without a bound. Owns no group (`models.nccl` makes those between devices)."""

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_SLICE_S = 0.05


def gloo_group(store: Any, rank: int, size: int, host: str, timeout_s: float) -> Any:
    """A group of `size` members over hosts; `host` is this one's address for the others. Blocks until all have come.
    Raises RuntimeError."""
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    gloo._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, rank, size, gloo)


def finished(work: Any, *, on_devices: bool) -> bool:
    """Wait for a collective, but only for a moment. Raises RuntimeError if it has failed."""
    if on_devices:
        if not work.is_completed():  # also once it has failed
            time.sleep(0.0005)
            return False
        work.wait(timedelta(seconds=_SLICE_S))  # with a timeout NCCL raises what went wrong, without it does not
        return True
    with suppress(RuntimeError):  # Not yet; or it failed, which is asked below.
        work.wait(timedelta(seconds=_SLICE_S))
    if not work.is_completed():
        return False
    work.wait()
    return True
