"""Memory of one process that another on the same device reads: two alternating pieces. Handles its export and release.

On CUDA by torch's CUDA IPC: a handle of the allocation is sent, and the receiver maps it. On a CPU by an anonymous
file, which the receiver opens by the maker's descriptor; it disappears with the maker, however that ends. On systems
without such files, by one in the temporary folder. The maker keeps it until all receivers have answered.
"""

import base64
import mmap
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contracts.handoff import HandOffError

_NAME = "paceline-window-"


class Window:
    """The sender's window. `pieces`: two uint8 tensors of `piece_bytes` on `device`."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        """Raises HandOffError if there is no memory for it."""
        self._device, self._file, self._descriptor = device, "", -1
        try:
            self._whole = self._made(piece_bytes)
        except (OSError, RuntimeError) as error:  # includes torch's OutOfMemoryError
            self.close()
            raise HandOffError(f"no memory for two pieces of {piece_bytes} bytes: {error}") from error
        self.pieces = [self._whole[:piece_bytes], self._whole[piece_bytes:]]

    def _made(self, piece_bytes: int) -> Tensor:
        device = self._device
        if device.type == "cuda":
            return torch.empty(2 * piece_bytes, dtype=torch.uint8, device=device)
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create(_NAME)
        else:
            self._descriptor, self._file = tempfile.mkstemp(prefix=_NAME)
        _take(self._descriptor, 2 * piece_bytes)
        return _mapped(self._descriptor, 2 * piece_bytes)

    def export(self) -> str:
        """Return a text for `opened`, in another process. Raises HandOffError if this device's memory cannot be
        shared."""
        if self._device.type != "cuda":
            return self._file or f"/proc/{os.getpid()}/fd/{self._descriptor}"
        from torch.multiprocessing.reductions import reduce_tensor

        try:
            return base64.b64encode(pickle.dumps(reduce_tensor(self._whole))).decode()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise HandOffError(f"CUDA IPC does not export this memory: {error}") from error

    def close(self) -> None:
        """Prevent further opens; on a CPU, processes that have it open keep it."""
        if self._file:
            Path(self._file).unlink(missing_ok=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.pieces = []
        self._whole = torch.empty(0)
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # frees what receivers have closed meanwhile


def opened(exported: str, device: torch.device) -> Tensor:
    """Return both pieces in one tensor, in a process on the same device. Do not write to it. Raises HandOffError."""
    try:
        if device.type != "cuda":
            with Path(exported).open("r+b") as file:
                if exported.startswith("/proc/") and _NAME not in str(
                    Path(f"/proc/self/fd/{file.fileno()}").readlink()
                ):
                    raise OSError("its maker has closed it, and something else has its descriptor")
                return _mapped(file.fileno(), os.fstat(file.fileno()).st_size)
        rebuild, arguments = pickle.loads(base64.b64decode(exported))
        return _on(device, rebuild, list(arguments))
    except (OSError, RuntimeError) as error:
        raise HandOffError(f"the memory of the learner on this device cannot be opened: {error}") from error


def _on(device: torch.device, rebuild: Any, arguments: list[Any]) -> Tensor:
    arguments[_STORAGE_DEVICE] = device.index or 0  # numbered as in this process
    tensor: Tensor = rebuild(*arguments)
    return tensor


_STORAGE_DEVICE = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor, torch 2.11 to 2.14; covered by a test


def _take(descriptor: int, size: int) -> None:
    """Allocate now, so that a full file system is an error here and not a signal at a later write."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _mapped(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
