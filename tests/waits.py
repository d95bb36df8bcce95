"""Refuses, on any device, operations for whose result a GPU would have to be waited for."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
# Each asks the host for a number or a shape that only the device knows.
_READS = {
    _ATEN._local_scalar_dense,
    _ATEN.bincount,
    _ATEN.equal,
    _ATEN.is_nonzero,
    _ATEN.masked_select,
    _ATEN.nonzero,
    _ATEN.unique_consecutive,
    _ATEN._unique2,
}
_INDEXED = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_}


class WaitError(AssertionError):
    """An operation would wait for the device."""


class NoWaits(TorchDispatchMode):
    """Inside it such an operation raises WaitError."""

    def __init__(self, hosts: Iterable[Tensor] = ()) -> None:
        """`hosts`: tensors that are on the host whatever the device is, such as AdamW's counts of steps."""
        super().__init__()
        self._hosts = {tensor.data_ptr() for tensor in hosts}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet is _ATEN._local_scalar_dense and args[0].data_ptr() in self._hosts:
            return func(*args, **kwargs)
        masks = packet in _INDEXED and any(isinstance(i, Tensor) and i.dtype is torch.bool for i in args[1])
        unsized = func is _ATEN.repeat_interleave.Tensor and kwargs.get("output_size") is None
        looked_at = packet is _ATEN.segment_reduce and not kwargs.get("unsafe", False)
        if packet in _READS or masks or unsized or looked_at:
            raise WaitError(f"{func} would wait for the device")
        return func(*args, **kwargs)
