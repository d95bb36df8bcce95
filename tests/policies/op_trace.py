"""What an engine step would launch on a GPU, from its own code on meta tensors: kernels, bytes and flops, no memory.

Owns the reading of one dispatched operation; never decides what a kernel costs in time (`policies.roofline`). Views and
allocations launch nothing; bytes are those that exist (an expanded dimension is read once, a gather reads what it
takes). Attention of torch counts as one kernel that reads every key and value once, which flatters it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Allocate or rename; no kernel.
_FREE = {"detach", "empty", "empty_strided", "empty_like", "new_empty", "_unsafe_view", "lift_fresh", "alias"}
# Several kernels behind one operation, by their usual number in torch 2.11.
_LAUNCHES = {"sort": 6, "topk": 4, "cumsum": 2}
_GATHERS = ("index", "index_select", "embedding", "gather")
_PRODUCTS = ("mm", "addmm", "_scaled_mm")
_WEIGHTED = ("linear", "head")


@dataclass(frozen=True, slots=True, kw_only=False)
class TracedOp:
    """One dispatched operation. Bytes and flops are of all its launches together."""

    name: str
    read_bytes: int
    write_bytes: int
    flops: float = 0.0
    launches: int = 1
    product: tuple[int, int, int] | None = None  # (m, n, k) of a matrix product


class OpTrace(TorchDispatchMode):
    """Inside the block every operation that would launch a kernel is kept in `ops`, in order.

    launches: of operators of our own, by name ("paceline::rms_norm"); `own` may say more of one, from its arguments.
    """

    def __init__(
        self,
        launches: dict[str, int] | None = None,
        own: dict[str, Callable[..., TracedOp]] | None = None,
    ) -> None:
        super().__init__()
        self.ops: list[TracedOp] = []
        self._launches, self._own = launches or {}, own or {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        full = func.name().partition(".")[0]
        if full in self._own:
            self.ops.append(self._own[full](*args, **kwargs))
            return func(*args, **kwargs)
        if full not in self._launches and torch.is_inference_mode_enabled() and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        name = full.partition("::")[2]
        if name in _FREE or _is_view(func):
            return out
        op = _read(name, args, kwargs, out)
        self.ops.append(replace(op, name=full, launches=self._launches[full]) if full in self._launches else op)
        return out


def _is_view(func: Any) -> bool:
    returns_alias = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    return returns_alias and not writes


def _read(name: str, args: Any, kwargs: Any, out: Any) -> TracedOp:
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    read, written, flops = sum(map(tensor_bytes, inputs)), sum(map(tensor_bytes, outputs)), 0.0
    product: tuple[int, int, int] | None = None
    if name in _PRODUCTS:
        a, b = args[name == "addmm" :][:2]
        product = a.shape[0], b.shape[1], a.shape[1]
    elif name == "low_bit_linear":  # values may lie two to a byte
        product = args[0].shape[0], args[2].shape[0], args[0].shape[1]
    elif name in _WEIGHTED:  # of ours: a weight is [N, K]
        product = args[0].shape[0], args[1].shape[0], args[1].shape[1]
    if product is not None:
        flops = 2.0 * product[0] * product[1] * product[2]
    if name in _GATHERS and inputs:
        read += written - tensor_bytes(inputs[0])
    if name == "index_put_":
        read, written = read - tensor_bytes(args[0]), tensor_bytes(args[2])
    if name in ("copy_", "fill_", "zero_"):  # overwrite without reading
        read -= tensor_bytes(args[0])
    return TracedOp(name, read, written, flops, _LAUNCHES.get(name, 1), product)


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes that exist behind it."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or size <= 1:
            count *= size
    return count * tensor.element_size()
