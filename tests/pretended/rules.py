"""Operations that are no plain computation: copies between host and device, what makes the host wait, indices, and the
kernels that only a device has. Owns which operation is which; `dispatch` does the rest.
"""

from typing import Any

import torch
from torch import Tensor

from tests.pretended import emulated, graphs
from tests.pretended.device import DEVICE, line
from tests.pretended.dispatch import EMULATED, KERNELS, RULES, WHOLE, compute, dispatch
from tests.pretended.tensor import CudaTensor, to_device, to_host

WAITS = (  # the size or the value of the result must be known on the host
    "nonzero.default",
    "masked_select.default",
    "_unique2.default",
    "unique_dim.default",
    "unique_consecutive.default",
    "bincount.default",
    "is_nonzero.default",
)
INDEXING = (
    "index.Tensor",
    "_unsafe_index.Tensor",
    "index_put_.default",
    "index_put.default",
    "_index_put_impl_.default",
    "_unsafe_index_put.default",
)
ALLOCATIONS = (
    "empty_like.default",
    "new_empty.default",
    "new_empty_strided.default",
    "lift_fresh.default",
    "_unsafe_view.default",
    "detach.default",
    "detach_.default",
    "set_.source_Tensor",
)


def install() -> None:
    """Into the tables of `dispatch`."""
    RULES["aten._to_copy.default"] = _to_copy
    RULES["aten.copy_.default"] = _copy
    RULES["aten._local_scalar_dense.default"] = _read
    RULES["aten.equal.default"] = _read
    RULES["aten.repeat_interleave.Tensor"] = _repeat_interleave
    RULES["aten._fused_sdp_choice.default"] = lambda op, args, kwargs: 0  # in plain torch, where autograd looks on
    RULES["aten.is_pinned.default"] = lambda op, args, kwargs: False
    RULES.update({f"aten.{name}": _waiting for name in WAITS})
    RULES.update({f"aten.{name}": _indexing for name in INDEXING})
    KERNELS.update({f"aten.{name}": 0 for name in ALLOCATIONS})
    WHOLE.add("aten.scaled_dot_product_attention.default")
    EMULATED.update(emulated.TABLE)


def _wait(what: str) -> None:
    graphs.refuse_in_capture(what)
    DEVICE.wait(what, line())


def _waiting(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _wait(str(op))
    return compute(op, args, kwargs)


def _read(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A value for the host: .item(), bool(), ==."""
    what = "item" if len(args) == 1 else str(op)
    graphs.refuse_in_capture(what)
    DEVICE.launch(what, line(), len(args) - 1)
    DEVICE.seen.downloads[what, line()] += 1
    _wait(what)
    with torch._C._DisableTorchDispatch():
        return op(*map(to_host, args), **kwargs)


def _repeat_interleave(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return compute(op, args, kwargs) if kwargs.get("output_size") is not None else _waiting(op, args, kwargs)


def _indexing(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Masks are counted on the host before they are an index; indices on the host are copied there first."""
    indices = [x for x in args[1] if isinstance(x, Tensor)]
    masks = [x for x in indices if x.dtype in (torch.bool, torch.uint8)]
    value = args[2] if len(args) > 2 else None
    filled = len(indices) == 1 and value is not None and value.numel() == 1 and not isinstance(value, CudaTensor)
    if masks and not filled:
        _wait("an index that is a mask")
    there = isinstance(args[0], CudaTensor)
    moved = tuple(x for x in indices if there and not isinstance(x, CudaTensor))
    for index in moved:
        graphs.refuse_in_capture("a copy from pageable memory")
        DEVICE.upload(index, line(), pinned=False, blocking=True)
    return compute(op, args, kwargs, free=moved)


def _to_copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x.to(...) of a tensor of the device; one of the host comes as `copy_`."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type == "cuda":
        return compute(op, args, kwargs)
    source, later = args[0], bool(kwargs.get("non_blocking"))
    if source.numel() and source.dtype is not (kwargs.get("dtype") or source.dtype):  # cast first, on the device
        source = compute(op, args, {"dtype": kwargs["dtype"]})
    with torch._C._DisableTorchDispatch():
        host = torch.empty_like(to_host(source), pin_memory=later)
    _download(host, source, later)
    return host


def _copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    later = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if isinstance(target, CudaTensor) and isinstance(source, CudaTensor):
        return compute(op, args, kwargs)
    if isinstance(target, CudaTensor):
        _upload(target, source, later)
    else:
        if source.dtype is not target.dtype:
            source = source.to(target.dtype)
        _download(target, source.expand(target.shape), later)
    return target


def _upload(target: CudaTensor, source: Tensor, later: bool) -> None:
    if not source.numel():
        return
    pinned, where = source.is_pinned(), line()
    if not pinned:
        graphs.refuse_in_capture("a copy from pageable memory")
    elif not later:
        graphs.refuse_in_capture("a copy that is waited for")
    host = target.host
    capture = graphs.capturing()
    if capture is not None:
        capture.will_write([host])

        def again() -> None:
            DEVICE.upload(source, where, pinned=True, blocking=False)
            host.copy_(source)

        capture.record(again, [], "upload", where, 0)
    with torch._C._DisableTorchDispatch():
        if capture is None:
            DEVICE.upload(source, where, pinned=pinned, blocking=not later)
        host.copy_(source)


def _download(target: Tensor, source: CudaTensor, later: bool) -> None:
    if not target.numel():
        return
    pinned, where = target.is_pinned(), line()
    if not pinned:
        graphs.refuse_in_capture("a copy to pageable memory")
    elif not later:
        graphs.refuse_in_capture("a copy that is waited for")
    host = source.host
    capture = graphs.capturing()
    with torch._C._DisableTorchDispatch():
        if capture is None:
            DEVICE.download(target, host, where, pinned=pinned, blocking=not later)
        else:
            capture.record(
                lambda: DEVICE.download(target, host, where, pinned=True, blocking=False), [], "download", where, 0
            )


def factories() -> dict[str, Any]:
    """Operations without a tensor argument that the device must make: by name in aten."""

    def made(name: str) -> Any:
        packet, overload = name.split(".") if "." in name else (name, "default")
        op = getattr(getattr(torch.ops.aten, packet), overload)

        def make(*args: Any, **kwargs: Any) -> Any:
            kwargs |= {"device": torch.device("cpu"), "pin_memory": False}
            if name.startswith("empty"):
                kwargs.pop("layout", None)
            with torch._C._DisableTorchDispatch():
                host = op(*args, **kwargs)
            capture, where = graphs.capturing(), line()
            kernels = 0 if name.startswith("empty") or not host.numel() else 1
            if kernels:
                DEVICE.launch(str(op), where)
            wrapped = to_device(host)
            if capture is not None:
                again = (lambda: op(*args, **kwargs)) if kernels else (lambda: host)
                capture.record(again, [host], str(op), where, kernels)
                capture.made(wrapped)
            return wrapped

        return make

    names = ["empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "linspace", "eye"]
    names += ["eye.m", "randperm", "tril_indices", "triu_indices"]
    return {name: made(name) for name in names}


__all__ = ["dispatch", "factories", "install"]
