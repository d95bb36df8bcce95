"""Resolve a `device` setting to a device of this machine, and set the CPU threads of a block of code."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def choose_device(wanted: str, key: str) -> str:
    """Return cpu or cuda. `wanted`: auto, cpu or cuda, the value of setting `key`. Raises RuntimeError if the device is
    missing."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"{key}=cuda, but there is no CUDA device for this process: use auto or cpu; on a cluster GPUs are "
            "given by cluster.gpus_per_worker and cluster.gpus_per_learner"
        )
    return wanted


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Set torch's number of CPU threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
