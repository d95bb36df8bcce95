"""Move tensors' numbers to the host to free their device memory, bit for bit, and back. The optimizer decides when."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Away:
    """Offloads tensors without replacing the objects, sharded ones too. In between they are empty and must not be
    used."""

    def __init__(self) -> None:
        self._hosts: dict[int, Tensor] = {}  # by the tensor's identity: made once, pinned on CUDA
        self._gone: list[tuple[Tensor, Tensor]] = []

    @property
    def gone(self) -> bool:
        return bool(self._gone)

    @torch.no_grad()
    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Free the tensors' memory; scalars, such as step counts, stay.

        Pass the same tensors every time; none may share memory with another. No effect while they are offloaded."""
        if self._gone:
            return
        for tensor in tensors:
            if tensor.dim() == 0:
                continue
            local: Any = getattr(tensor, "_local_tensor", tensor)  # a DTensor's local part itself, not a view
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
        """Allocate memory again and restore the numbers; no effect if nothing is offloaded. Raises
        torch.OutOfMemoryError if there is none; restored tensors stay, and the call can be repeated."""
        while self._gone:
            local, host = self._gone[-1]
            back = torch.empty_like(host, device=local.device, pin_memory=False)
            back.copy_(host, non_blocking=True)
            local.data = back
            self._gone.pop()
