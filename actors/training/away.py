"""Tensors that give their device's memory up and keep their numbers on the host, bit for bit. Owns the copies; never
decides when (the optimizer does), and knows nothing of optimizers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Away:
    """The tensors stay the objects they are, sharded ones too: their memory goes and comes back under them. In between
    they are empty, and nobody may read or write them."""

    def __init__(self) -> None:
        self._hosts: dict[int, Tensor] = {}  # by the tensor's own identity: made once, pinned on CUDA
        self._gone: list[tuple[Tensor, Tensor]] = []

    @property
    def gone(self) -> bool:
        return bool(self._gone)

    @torch.no_grad()
    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Give their memory up; scalars, such as step counts, stay. The same tensors every time, none of which shares
        memory with another. Does nothing while they are away."""
        if self._gone:
            return
        for tensor in tensors:
            if tensor.dim() == 0:
                continue
            local: Any = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own part, not a view of it
            host = self._hosts.get(id(local))
            if host is None:
                host = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._hosts[id(local)] = host
            host.copy_(local, non_blocking=True)
            self._gone.append((local, host))
        if any(local.is_cuda for local, _ in self._gone):
            torch.cuda.synchronize()
        for local, _ in self._gone:
            local.data = local.new_empty(0)

    @torch.no_grad()
    def come_back(self) -> None:
        """Take memory again, with the numbers that were there. Does nothing where nothing is away. Raises
        torch.OutOfMemoryError if there is none; what is back then stays, and it can be called again."""
        while self._gone:
            local, host = self._gone[-1]
            back = torch.empty_like(host, device=local.device, pin_memory=False)
            back.copy_(host, non_blocking=True)
            local.data = back
            self._gone.pop()
