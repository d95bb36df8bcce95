"""A kernel launch as plain data, and how a plan of launches runs: by Triton the first time, directly afterwards.

A plan depends on shapes alone. A later call of equal shapes has the same kernels, grids and numbers as the first one;
only addresses differ. Such a call makes no plan and does not ask Triton for the variant. What is remembered holds no
tensor. Launches bound an eager step of a small model: there are six per layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

_MOST_CALLS = 2048  # remembered; then all are forgotten: mixed steps have ever new numbers of rows
_ALIGNMENT = 16  # bytes: Triton compiles another variant for an address that is no multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Sequence[Any]  # by position
    constants: dict[str, Any]  # the kernel's constexprs
    warps: int = 4
    stages: int = 3
    registers: int | None = field(default=None)  # at most, where the compiler would otherwise spill to keep fewer

    def run(self) -> Any:
        """Launch; the compiled kernel, or None in the interpreter."""
        device = self.arguments[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._jit(warmup=False)
        return self._jit(warmup=False)

    def compile(self) -> Any:
        """Compile the kernel for the active driver's device without launching it."""
        return self._jit(warmup=True)

    @property
    def constexprs(self) -> dict[str, Any]:
        """Its constants, and whether it starts while the kernel before it ends, if the kernel is made for that."""
        return self.constants | {"PDL": overlaps()} if "PDL" in self.kernel.arg_names else self.constants

    def _jit(self, *, warmup: bool) -> Any:
        options: dict[str, Any] = {} if self.registers is None else {"maxnreg": self.registers}
        constexprs = self.constexprs
        if constexprs.get("PDL"):
            options["launch_pdl"] = True
        # Without fusion a sum's bits are those that the source says, in every variant of a kernel.
        return self.kernel.run(
            *self.arguments,
            grid=self.grid,
            warmup=warmup,
            **constexprs,
            num_warps=self.warps,
            num_stages=self.stages,
            enable_fp_fusion=False,
            **options,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A plan without its tensors: of each launch the compiled kernel, its grid, what else Triton hands over (no hooks),
    and its arguments among all addresses and numbers."""

    launches: list[tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], Callable[..., tuple[Any, ...]]]]
    made: list[tuple[torch.Size, torch.dtype]]  # partial results that the plan makes for itself
    numbers: tuple[Any, ...]


_known: dict[tuple[Any, ...], _Known] = {}
_apart = False  # whether kernels start only when the one before has ended, although the device could do otherwise


def overlaps() -> bool:
    """Whether kernels start while those before them end (`overlap`): on NVIDIA's GPUs from compute capability 9.0 on,
    by the device that Triton compiles for, and not in the interpreter."""
    if _apart or knobs.runtime.interpret:
        return False
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


def launch_apart() -> bool:
    """From now on start a kernel only when the one before has ended. False: that is so already."""
    global _apart
    overlapped, _apart = overlaps(), True
    _known.clear()  # which holds compiled kernels
    return overlapped


def run_plan(plan: Callable[..., list[Launch]], *arguments: Any) -> _Known | None:
    """Run `plan(*arguments)`: tensors, the first of them on the device, and hashable values.

    Equal shapes, strides, dtypes and values must give equal plans but for the tensors in them. Returns what is
    remembered of the plan, if anything is.
    """
    device = arguments[0].device
    seen: list[Any] = [plan, device]
    addresses: list[int] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            addresses.append(argument.data_ptr())
            seen += (argument.shape, argument.stride(), argument.dtype)
        else:
            seen.append(argument)
    call = tuple(seen)
    usual = _aligned(addresses) and (device.type != "cuda" or device.index == torch.cuda.current_device())
    known = _known.get(call) if usual else None
    if known is not None:
        _launch(known, addresses, device)
        return known
    launches = plan(*arguments)
    kernels = [launch.run() for launch in launches]
    if not usual or None in kernels:
        return None
    return _remember(call, [x for x in arguments if isinstance(x, Tensor)], launches, kernels)


class LayerCalls:
    """`run_plan` for the layers of one step, which are alike: of calls by one plan only the first is looked up, and the
    others are taken to have its shapes, values and device."""

    def __init__(self) -> None:
        self._known: dict[Callable[..., list[Launch]], tuple[_Known, Callable[..., tuple[Tensor, ...]]]] = {}

    def __call__(self, plan: Callable[..., list[Launch]], *arguments: Any) -> None:
        alike = self._known.get(plan)
        if alike is not None:
            known, tensors = alike
            addresses = [x.data_ptr() for x in tensors(arguments)]
            if _aligned(addresses):
                _launch(known, addresses, arguments[0].device)
                return
        found = run_plan(plan, *arguments)
        if found is not None:
            places = [place for place, x in enumerate(arguments) if isinstance(x, Tensor)]
            self._known[plan] = found, itemgetter(*places)


def _aligned(addresses: list[int]) -> bool:
    joined = 0
    for address in addresses:
        joined |= address
    return not joined % _ALIGNMENT


def _launch(known: _Known, addresses: list[int], device: torch.device) -> None:
    if known.made:
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in known.made]
        addresses += [x.data_ptr() for x in made]
    values = (*addresses, *known.numbers)
    stream = driver.active.get_current_stream(device.index or 0)
    for run, grid, kernel, pick in known.launches:
        run(*grid, stream, *kernel, *pick(values))


def _remember(call: tuple[Any, ...], given: list[Tensor], launches: list[Launch], kernels: list[Any]) -> _Known | None:
    """Return where each launch's arguments come from; None if that is ambiguous (a tensor given twice, or a view)."""
    made: list[Tensor] = []
    numbers: list[Any] = []
    places = {id(x): place for place, x in enumerate(given)}
    if len(places) < len(given):
        return None
    taken = []
    for launch in launches:
        own, constexprs = iter(launch.arguments), launch.constexprs
        values = [constexprs[n] if n in constexprs else next(own) for n in launch.kernel.arg_names]
        taken.append(values)
        for value in values:
            if not isinstance(value, Tensor):
                numbers.append(value)
            elif id(value) not in places:
                places[id(value)] = len(given) + len(made)
                made.append(value)
    memory = {x.untyped_storage().data_ptr() for x in given}
    if any(x.untyped_storage().data_ptr() in memory or not x.is_contiguous() for x in made):
        return None
    behind = iter(range(len(given) + len(made), len(given) + len(made) + len(numbers)))
    known = _Known(
        launches=[
            (
                kernel.run,  # as Triton's own dispatch calls it in 3.7 and 3.8
                (*launch.grid, 1, 1)[:3],
                (kernel.function, kernel.packed_metadata, None, None, None),
                itemgetter(*[places[id(v)] if isinstance(v, Tensor) else next(behind) for v in values]),
            )
            for launch, kernel, values in zip(launches, kernels, taken, strict=True)
        ],
        made=[(x.shape, x.dtype) for x in made],
        numbers=tuple(numbers),
    )
    if len(_known) >= _MOST_CALLS:
        _known.clear()
    _known[call] = known
    return known
