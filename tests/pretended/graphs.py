"""Captured graphs of the pretended device. Owns the tape of a capture and what a replay does.

As on a device: what is captured does not run (its writes are taken back, its results hold garbage), a replay runs the
same computations on the same addresses, and a graph uses memory that other graphs of its pool used before it: what
those left there, and nobody holds, is poisoned.
"""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.pretended.device import DEVICE, IllegalInCaptureError, line, poison
from tests.pretended.tensor import tensors_in

_local = threading.local()
_pools: dict[object, list["weakref.ref[Graph]"]] = {}


def capturing() -> "Capture | None":
    """The capture of this thread."""
    return getattr(_local, "capture", None)


def refuse_in_capture(what: str) -> None:
    """Raises IllegalInCaptureError, and spoils the capture, if this thread is capturing."""
    capture = capturing()
    if capture is not None:
        capture.spoiled = f"operation not permitted when stream is capturing: {what} at {line()}"
        raise IllegalInCaptureError(capture.spoiled)


class _Step:
    __slots__ = ("again", "kernels", "line", "outs", "what")

    def __init__(self, again: Callable[[], Any], outs: list[Tensor], what: str, line: str, kernels: int) -> None:
        self.again, self.outs, self.what, self.line, self.kernels = again, outs, what, line, kernels


class Capture:
    """What is recorded between the beginning and the end of a capture."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.spoiled: str | None = None
        self.tensors: dict[int, list[weakref.ref[Tensor]]] = {}  # address of the memory -> what holds it
        self._before: list[tuple[Tensor, Tensor]] = []

    def record(self, again: Callable[[], Any], outs: list[Tensor], what: str, where: str, kernels: int) -> None:
        self.steps.append(_Step(again, outs, what, where, kernels))

    def made(self, tensor: Any) -> None:
        self.tensors.setdefault(tensor.host.untyped_storage().data_ptr(), []).append(weakref.ref(tensor))

    def will_write(self, targets: list[Tensor]) -> None:
        """Host memory that is about to change: nothing runs while a graph is captured, so it changes back."""
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            for target in targets:
                self._before.append((target, target.clone()))

    def take_back(self) -> None:
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            for target, value in reversed(self._before):
                target.copy_(value)
        self._before.clear()


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None
        self._pool: object = None
        self._reused: list[tuple[weakref.ref[Graph], set[int]]] = []  # memory of earlier graphs that this one may use

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        if capturing() is not None:
            raise IllegalInCaptureError("a stream is capturing already")
        self._pool = pool if pool is not None else object()
        others = [graph for one in _pools.get(self._pool, []) if (graph := one()) is not None]
        self._reused = [(weakref.ref(other), other.dropped()) for other in others]
        _local.capture = Capture()

    def capture_end(self) -> None:
        capture, _local.capture = _local.capture, None
        capture.take_back()
        if capture.spoiled:
            raise IllegalInCaptureError(f"the capture is spoiled: {capture.spoiled}")
        self._capture = capture
        _pools.setdefault(self._pool, []).append(weakref.ref(self))
        self.poison({x.untyped_storage().data_ptr() for step in capture.steps for x in step.outs})
        DEVICE.seen.captures[f"{sum(step.kernels for step in capture.steps)} kernels", line()] += 1

    def abandon(self) -> None:
        """The captured code raised."""
        if capturing() is not None:
            capture, _local.capture = _local.capture, None
            capture.take_back()

    def instantiate(self) -> None:
        pass

    def pool(self) -> object:
        return self._pool

    def reset(self) -> None:
        self._capture = None

    def dropped(self) -> set[int]:
        """Addresses of this graph's memory that no tensor holds any more: free for later graphs of the pool."""
        assert self._capture is not None
        alive = {
            address
            for address, tensors in self._capture.tensors.items()
            if any(reference() is not None for reference in tensors)
        }
        return {x.untyped_storage().data_ptr() for step in self._capture.steps for x in step.outs} - alive

    def poison(self, addresses: set[int]) -> None:
        if self._capture is None:
            return
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            for step in self._capture.steps:
                for out in step.outs:
                    if out.untyped_storage().data_ptr() in addresses:
                        poison(out)

    def replay(self) -> None:
        refuse_in_capture("a replay")
        if self._capture is None:
            raise RuntimeError("replay of a graph that was not captured")
        self._spoil_neighbours()
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            for step in self._capture.steps:
                found = step.again()
                for out, new in zip(step.outs, tensors_in(found) if step.outs else (), strict=True):
                    if out.data_ptr() != new.data_ptr():
                        out.copy_(new)
                if step.kernels:
                    DEVICE.replayed(step.what, step.line, step.kernels)
        where = line()
        DEVICE.seen.replays[f"{sum(step.kernels for step in self._capture.steps)} kernels", where] += 1
        DEVICE.seen.launches["replay", where] += 1

    def _spoil_neighbours(self) -> None:
        """What this graph writes may lie where others of its pool have theirs."""
        assert self._capture is not None
        for reference, addresses in self._reused:
            earlier = reference()
            if earlier is not None:
                earlier.poison(addresses)
        for one in _pools.get(self._pool, []):
            later = one()
            if later is not None and any(reference() is self and freed for reference, freed in later._reused):
                assert later._capture is not None
                later.poison({x.untyped_storage().data_ptr() for step in later._capture.steps for x in step.outs})


class capture_of:  # noqa: N801 - stands in for torch.cuda.graph
    """torch.cuda.graph."""

    def __init__(
        self, cuda_graph: Graph, pool: object = None, stream: object = None, capture_error_mode: str = "global"
    ) -> None:
        self._graph, self._pool, self._mode = cuda_graph, pool, capture_error_mode

    def __enter__(self) -> None:
        DEVICE.wait("before a capture", line())
        gc.collect()
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._graph.capture_end()
        else:
            self._graph.abandon()
