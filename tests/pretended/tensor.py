"""Tensors of the pretended device: they say cuda:0, and the memory behind them is a host tensor of the same layout.

Owns nothing but the pair. Autograd, views and in-place operations see an ordinary tensor; `dispatch` says what an
operation does.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.pretended.device import DEVICE

CUDA = torch.device("cuda", 0)
_handler: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = []


class CudaTensor(Tensor):
    """`host`: where its values are."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "CudaTensor":
        wrapper: CudaTensor = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=CUDA,
        )
        wrapper.host = host
        DEVICE.holds(wrapper, host)
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _handler[0](func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CudaTensor({self.host!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch.save and pickle: as the tensor of a real device, by way of the host.
        return revived, (self.detach().cpu(), self.requires_grad)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return self.detach().cpu().numpy()

    def _data(self) -> Tensor:
        return self.detach()

    def _set_data(self, other: Tensor) -> None:
        if not isinstance(other, CudaTensor) or other.shape != self.shape or other.stride() != self.stride():
            raise NotImplementedError("pretended device: .data takes a tensor of the same device and layout only")
        self.host = other.host
        DEVICE.holds(self, other.host)

    data = property(_data, _set_data)


def handle_with(handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """What computes an operation on these tensors: handler(op, args, kwargs)."""
    _handler[:] = [handler]


def to_device(value: Any) -> Any:
    """`value` on the device, with the same memory: a tensor, or those in a list or tuple; others stay as they are."""
    if isinstance(value, Tensor):
        return value if isinstance(value, CudaTensor) else CudaTensor(value)
    if isinstance(value, (list, tuple)):
        return type(value)([to_device(one) for one in value])
    return value


def to_host(value: Any) -> Any:
    """The memory of a tensor of the device, or of each in a list or tuple; anything else stays as it is."""
    if isinstance(value, CudaTensor):
        return value.host
    if isinstance(value, (list, tuple)):
        return type(value)([to_host(one) for one in value])
    return value


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Those among arguments or results, in lists and tuples too."""
    for value in values if isinstance(values, (list, tuple)) else (values,):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def revived(host: Tensor, requires_grad: bool) -> Tensor:
    """From a file."""
    return host.to(CUDA).requires_grad_(requires_grad)
