"""The names of torch.cuda on the pretended device, and its installation: streams and events of the one queue, graphs,
memory of the tensors alive."""

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tests.pretended import graphs, rules
from tests.pretended.device import DEVICE, line
from tests.pretended.dispatch import INTERPRETED, dispatch
from tests.pretended.tensor import handle_with, revived

NAME = "pretended"
TOTAL_BYTES = 80 << 30
_library: list[torch.library.Library] = []  # alive as long as the process


class Event:
    """torch.cuda.Event: a place in the queue."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._place = 0

    def record(self, stream: object = None) -> None:
        self._place = DEVICE.now()

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        graphs.refuse_in_capture("waiting for an event")
        DEVICE.wait("event", line(), self._place)

    def query(self) -> bool:
        graphs.refuse_in_capture("asking for an event")
        return DEVICE.is_finished(self._place)

    def elapsed_time(self, end: "Event") -> float:
        return 0.0


class Stream:
    """torch.cuda.Stream: all are one queue."""

    device = torch.device("cuda", 0)

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.cuda_stream = 0

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        graphs.refuse_in_capture("asking for a stream")
        return DEVICE.is_finished(DEVICE.now())

    def synchronize(self) -> None:
        graphs.refuse_in_capture("waiting for a stream")
        DEVICE.wait("stream", line())


_current = threading.local()


def _current_stream(device: object = None) -> Stream:
    if not hasattr(_current, "stream"):
        _current.stream = Stream()
    stream: Stream = _current.stream
    return stream


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    before, _current.stream = _current_stream(), stream or _current_stream()
    try:
        yield
    finally:
        _current.stream = before


@contextmanager
def _device(device: object) -> Iterator[None]:
    yield


def _synchronize(device: object = None) -> None:
    graphs.refuse_in_capture("waiting for the device")
    DEVICE.wait("device", line())


def _reset_peak(device: object = None) -> None:
    DEVICE.peak_bytes = DEVICE.allocated_bytes


def _nothing() -> Callable[..., None]:
    """Another function each time: torch._dynamo tells them apart by identity."""
    return lambda *args, **kwargs: None


def install() -> None:
    """Only once, and for the life of the process."""
    if INTERPRETED:
        importlib.import_module("tests.ops.triton.interpreter")  # before anything imports Triton
    rules.install()
    handle_with(dispatch)
    library = torch.library.Library("aten", "IMPL")
    for name, make in rules.factories().items():
        library.impl(name, make, "CUDA")
    _library.append(library)
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=TOTAL_BYTES, multi_processor_count=132, warp_size=32
    )
    names: dict[str, Any] = {
        "CUDAGraph": graphs.Graph,
        "Event": Event,
        "Stream": Stream,
        "_exchange_device": lambda device: 0,
        "_lazy_init": _nothing(),
        "_maybe_exchange_device": lambda device: 0,
        "current_device": lambda: 0,
        "current_stream": _current_stream,
        "default_stream": lambda device=None: _current_stream(),
        "device": _device,
        "device_count": lambda: 1,
        "empty_cache": _nothing(),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: properties,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "graph": graphs.capture_of,
        "graph_pool_handle": lambda: (0, next(_pool_numbers)),
        "init": _nothing(),
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: graphs.capturing() is not None,
        "is_initialized": lambda: True,
        "manual_seed": _nothing(),
        "manual_seed_all": _nothing(),
        "max_memory_allocated": lambda device=None: DEVICE.peak_bytes,
        "max_memory_reserved": lambda device=None: DEVICE.peak_bytes,
        "mem_get_info": lambda device=None: (TOTAL_BYTES - DEVICE.allocated_bytes, TOTAL_BYTES),
        "memory_allocated": lambda device=None: DEVICE.allocated_bytes,
        "memory_reserved": lambda device=None: DEVICE.allocated_bytes,
        "reset_peak_memory_stats": _reset_peak,
        "set_device": _nothing(),
        "set_rng_state": _nothing(),
        "stream": _stream,
        "synchronize": _synchronize,
    }
    for name, value in names.items():
        setattr(torch.cuda, name, value)
    # torch.tensor(..., device="cuda") shows its copy to the device, as `.to` does.
    torch._C._set_only_lift_cpu_tensors(True)
    torch.serialization.add_safe_globals([revived])
    # A module's parameters are replaced when it moves: those of the device are of another class.
    torch.__future__.set_overwrite_module_params_on_conversion(True)


_pool_numbers = iter(range(1, 1 << 62))
