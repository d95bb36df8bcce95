"""Where a network runs. The one place that turns a `device` setting into a device of this machine, and
that gives a block of code its CPU threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def choose_device(wanted: str, key: str) -> str:
    """cpu or cuda. `wanted`: auto, cpu or cuda, as the setting `key` says. RuntimeError if this process has none."""
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
    """torch computes with so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
