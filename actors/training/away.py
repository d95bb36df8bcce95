"""Tensors that give their device's memory up and keep their numbers on the host, bit for bit. Owns the copies; never
decides when (the optimizer does), and knows nothing of optimizers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Away:
    """The tensors stay the objects they are, sharded ones too: their memory goes and comes back under them. In between
    nobody may read or write them."""

    def __init__(self) -> None:
        self._hosts: dict[int, Tensor] = {}  # by the storage's own identity: made once, pinned on CUDA
        self._gone: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def gone(self) -> bool:
        return bool(self._gone)

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Give their memory up. Does nothing while tensors are away."""
        if self._gone:
            return
        on_cuda = False
        for tensor in tensors:
            local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            if not storage.nbytes() or local.dim() == 0:  # a step count: nothing to win, and read on the host
                continue
            on_cuda |= local.is_cuda
            key = storage._cdata
            if key not in self._hosts or self._hosts[key].numel() != storage.nbytes():
                self._hosts[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=local.is_cuda)
            self._hosts[key].copy_(_bytes(storage), non_blocking=True)
            self._gone.append((storage, self._hosts[key]))
        if on_cuda:
            torch.cuda.synchronize()
        for storage, _ in self._gone:
            storage.resize_(0)
        if on_cuda:
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        """Take memory again, with the numbers that were there. Does nothing where nothing is away. Raises
        torch.OutOfMemoryError if there is none; what is back then stays, and it can be called again."""
        while self._gone:
            storage, host = self._gone[-1]
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
            self._gone.pop()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
