"""What an operation on the device's tensors does: it computes with the CPU's kernels on the memory behind them, is
counted as launches, and goes onto the tape of a graph that is being captured. Knows which operations are views, which
write their arguments, and which tensors may not meet. Exceptions to the rule are in `rules`.
"""

import importlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.pretended import graphs
from tests.pretended.device import DEVICE, MixedDevicesError, line
from tests.pretended.tensor import CudaTensor, tensors_in, to_device, to_host

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[str, Rule] = {}  # by name, as "aten.copy_.default"
EMULATED: dict[str, Callable[..., Any]] = {}  # on host tensors: what the CPU has no kernel for
KERNELS: dict[str, int] = {}  # how many an operation is, where it is not one
# Our own operators by their Triton kernels in the interpreter (slow), else by their CPU implementation, the oracle.
INTERPRETED = os.environ.get("PACELINE_PRETENDED_KERNELS") == "triton"
WHOLE: set[str] = set()  # composite, but one kernel on a device: not taken apart


@dataclass(frozen=True, slots=True)
class Kind:
    """What a schema says."""

    name: str
    view: bool
    written: tuple[tuple[int, str], ...]  # arguments: place, name
    results: tuple[bool, ...]  # each result: whether it is new, not one of the written arguments
    composite: bool

    @staticmethod
    @cache
    def of(op: Any) -> "Kind":
        schema = op._schema
        written = [
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        results = tuple(each.alias_info is None or not each.alias_info.is_write for each in schema.returns)
        view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        return Kind(str(op), view, tuple(written), results, op._can_decompose())


def dispatch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`op` with at least one tensor of the device among its arguments."""
    kind = Kind.of(op)
    rule = RULES.get(kind.name)
    if rule is not None:
        return rule(op, args, kwargs)
    # In inference mode composites arrive whole; elsewhere torch has taken them apart.
    if kind.composite and torch.is_inference_mode_enabled() and kind.name not in WHOLE:
        return op.decompose(*args, **kwargs)
    return compute(op, args, kwargs)


def compute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, free: tuple[Tensor, ...] = ()) -> Any:
    """`op` on host memory. `free`: host tensors that may be among the arguments."""
    kind = Kind.of(op)
    refuse_mixed(kind.name, args, kwargs, free)
    on_device = _result_on_device(kwargs)
    host_args, host_kwargs = to_host(args), {name: to_host(value) for name, value in _on_cpu(kwargs).items()}
    run = _computed_by(kind.name, op)

    def again() -> Any:
        return run(*host_args, **host_kwargs)

    capture = graphs.capturing()
    if capture is not None and kind.written:
        capture.will_write(list(tensors_in(_written(kind, host_args, host_kwargs))))
    with torch._C._DisableTorchDispatch():
        found = again()
    written = _written(kind, args, kwargs)
    results = found if isinstance(found, tuple) and len(kind.results) > 1 else (found,)
    new = _new(found, kind.results)
    if not kind.view and on_device:
        outs, where = list(tensors_in(new)), line()
        kernels = kernels_of(op) if any(x.numel() for x in tensors_in([new, written])) else 0
        if kernels:
            DEVICE.launch(kind.name, where, kernels)
        if capture is not None and (kernels or outs):
            capture.record(lambda: _new(again(), kind.results), outs, kind.name, where, kernels)
    _same_shapes(kind.name, written)
    if not kind.written:
        return _wrapped(found, args, kind.view, capture) if on_device else found
    left = iter(written)
    answers = [
        _wrapped(x, args, False, capture) if is_new else next(left)
        for x, is_new in zip(results, kind.results, strict=False)
    ]
    return None if not kind.results else answers[0] if len(answers) == 1 else tuple(answers)


def _new(found: Any, results: tuple[bool, ...]) -> list[Any]:
    each = found if isinstance(found, tuple) and len(results) > 1 else (found,)
    return [result for result, is_new in zip(each, results, strict=False) if is_new]


def _computed_by(name: str, op: Any) -> Callable[..., Any]:
    if INTERPRETED and op.namespace == "paceline":
        return launcher(op._schema.name.removeprefix("paceline::")) or op
    return EMULATED.get(name, op)


@cache
def launcher(name: str) -> Callable[..., Any] | None:
    """Our Triton kernels themselves, in the interpreter; None where a library of the device computes."""
    launchers = ("launch", "launch_drafting", "launch_low_bit")
    modules = (importlib.import_module(f"models.ops.triton.{module}") for module in launchers)
    return next((getattr(module, name) for module in modules if hasattr(module, name)), None)


def refuse_mixed(name: str, args: Any, kwargs: Any, free: tuple[Tensor, ...] = ()) -> None:
    """Host tensors of no dimension are numbers; others do not meet the device's."""
    for value in tensors_in((args, tuple(kwargs.values()))):
        if not isinstance(value, CudaTensor) and value.dim() and not any(value is one for one in free):
            raise MixedDevicesError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"({name}, {list(value.shape)} at {line()})"
            )


def kernels_of(op: Any) -> int:
    """Launches of a call; ours have a table beside them."""
    if op.namespace == "paceline":
        table = importlib.import_module("models.ops.triton").LAUNCHES
        return int(table[op._schema.name.removeprefix("paceline::")])
    return KERNELS.get(str(op), 1)


def _wrapped(found: Any, args: Any, view: bool, capture: "graphs.Capture | None") -> Any:
    # A view of an ordinary tensor is one, in inference mode too.
    ordinary = view and torch.is_inference_mode_enabled() and not next(tensors_in(args)).is_inference()
    with torch.inference_mode(False) if ordinary else nullcontext():
        wrapped = to_device(found)
    if capture is not None:
        for tensor in tensors_in(wrapped):
            capture.made(tensor)
    return wrapped


def _written(kind: Kind, args: Any, kwargs: Any) -> list[Any]:
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in kind.written]


def _same_shapes(name: str, written: list[Any]) -> None:
    for tensor in tensors_in(written):
        if isinstance(tensor, CudaTensor) and tensor.shape != tensor.host.shape:
            raise NotImplementedError(f"pretended device: {name} resizes a tensor at {line()}")


def _result_on_device(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cuda"


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs if kwargs.get("device") is None else kwargs | {"device": torch.device("cpu")}
