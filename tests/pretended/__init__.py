"""A pretended CUDA device for a torch without CUDA: `python -m pytest -p tests.pretended.plugin tests/gpu`.

Tensors say cuda:0, hold real values in host memory and compute with the CPU's kernels; what a real device would refuse
is refused, what it would make the host wait for is counted. It changes the whole process for good, so only processes
of their own load it (`install`). What it cannot show: time, rounding of the device's kernels, its memory.

    guard.cpp, build.py   what torch asks of a device below Python
    device.py             counts by line of ours, the queue of asynchronous copies, memory of the tensors alive
    tensor.py             tensors;  dispatch.py, rules.py, emulated.py: what an operation on them does
    graphs.py             capture, its legality, replay;  cuda.py: the names of torch.cuda
    counting.py           for tests: `with counting() as seen`
"""

_installed = False


def active() -> bool:
    """Whether this process has the pretended device."""
    return _installed


def install() -> None:
    """Make the device this process's only CUDA device. Call it before torch is imported. Raises RuntimeError."""
    global _installed
    if _installed:
        return
    from tests.pretended.build import load

    load()
    from tests.pretended import cuda

    cuda.install()
    _installed = True
