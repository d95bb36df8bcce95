"""What the pretended device counts and remembers. Owns the counts by line of ours, the queue of asynchronous copies
between host and device, and which device memory is alive; knows no operation.

The device is one in-order queue. A computation happens at once; a copy between pinned memory and the device has its
effect on the host only when the host waits for it: until then a download holds garbage, and a source that changes is
an error.
"""

import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_ROOT = Path(__file__).parents[2]
_DEPTH = 3  # lines of ours that a count keeps


class IllegalInCaptureError(RuntimeError):
    """CUDA refuses it while a stream is capturing."""


class MixedDevicesError(RuntimeError):
    """Tensors of host and device in one operation."""


class PinnedRaceError(RuntimeError):
    """Pinned memory was written while a copy from it may still be running."""


class Tally(Counter[tuple[str, str]]):
    """How often (what, line): `line` is ours, innermost first, as `file:line < file:line`."""

    def lines(self) -> Counter[str]:
        """By innermost line."""
        counts: Counter[str] = Counter()
        for (_, line), times in self.items():
            counts[line.split(" < ")[0]] += times
        return counts

    def whats(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for (what, _), times in self.items():
            counts[what] += times
        return counts


@dataclass(slots=True)
class Seen:
    """What happened on the device."""

    kernels: Tally = field(default_factory=Tally)  # what the device ran, in replays too
    launches: Tally = field(default_factory=Tally)  # what the host asked for: a replay is one
    waits: Tally = field(default_factory=Tally)  # the host waited for what was not done yet
    pageable: Tally = field(default_factory=Tally)  # copies from or to memory that is not pinned
    uploads: Tally = field(default_factory=Tally)  # copies to the device, of any kind
    downloads: Tally = field(default_factory=Tally)
    captures: Tally = field(default_factory=Tally)
    replays: Tally = field(default_factory=Tally)

    def minus(self, before: "Seen") -> "Seen":
        parts = {}
        for one in fields(self):
            now, then = getattr(self, one.name), getattr(before, one.name)
            parts[one.name] = Tally({key: n - then[key] for key, n in now.items() if n > then[key]})
        return Seen(**parts)

    def copy(self) -> "Seen":
        return Seen(**{one.name: Tally(getattr(self, one.name)) for one in fields(self)})


class _Copy:
    """A copy between pinned memory and the device that the host has not waited for."""

    def __init__(self, place: int, host: Tensor, value: Tensor, line: str, *, download: bool) -> None:
        self.place, self._host, self._value, self._line, self._download = place, host, value, line, download

    def finish(self) -> None:
        if self._download:
            self._host.copy_(self._value)
        elif not same_bits(self._host, self._value):
            raise PinnedRaceError(
                f"pinned memory was written before its copy to the device was waited for: {self._line}"
            )


class Device:
    """`seen` counts from the start of the process."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.allocated_bytes = self.peak_bytes = 0
        self._storages: dict[int, list[int]] = {}  # address -> tensors of it, bytes
        self._submitted = self._finished = 0
        self._copies: list[_Copy] = []

    # Kernels and copies.

    def launch(self, what: str, line: str, kernels: int = 1) -> None:
        self._submitted += 1
        self.seen.kernels[what, line] += kernels
        self.seen.launches[what, line] += kernels

    def replayed(self, what: str, line: str, kernels: int) -> None:
        self._submitted += 1
        self.seen.kernels[what, line] += kernels

    def upload(self, source: Tensor, line: str, *, pinned: bool, blocking: bool) -> None:
        """A copy from `source`, in host memory."""
        what = f"upload {list(source.shape)}"
        self._submitted += 1
        self.seen.uploads[what, line] += 1
        if not pinned:
            self.seen.pageable[what, line] += 1
        if blocking:
            self.wait(what, line)
        elif pinned:
            self._copies.append(_Copy(self._submitted, source, source.clone(), line, download=False))

    def download(self, target: Tensor, value: Tensor, line: str, *, pinned: bool, blocking: bool) -> None:
        """A copy of `value` to `target`, in host memory; `target` holds garbage until it is waited for."""
        what = f"download {list(target.shape)}"
        self._submitted += 1
        self.seen.downloads[what, line] += 1
        if not pinned:
            self.seen.pageable[what, line] += 1
        if blocking or not pinned:
            self.wait(what, line)
            target.copy_(value)
        else:
            self._copies.append(_Copy(self._submitted, target, value.clone(), line, download=True))
            poison(target)

    # The queue.

    def now(self) -> int:
        """A place in the queue: behind everything submitted so far."""
        return self._submitted

    def wait(self, what: str, line: str, place: int | None = None) -> None:
        """The host waits for what was submitted before `place` (default: everything). Not counted if it is done."""
        place = self._submitted if place is None else place
        if place > self._finished:
            self.seen.waits[what, line] += 1
        self.finish(place)

    def is_finished(self, place: int) -> bool:
        return place <= self._finished

    def finish(self, place: int) -> None:
        """Everything before `place` is done."""
        self._finished = max(self._finished, place)
        due = [copy for copy in self._copies if copy.place <= place]
        self._copies = [copy for copy in self._copies if copy.place > place]
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            for copy in due:
                copy.finish()

    # Memory of tensors.

    def holds(self, tensor: object, host: Tensor) -> None:
        """`tensor` lives on the device, with the memory of `host`."""
        storage = host.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size:
            return
        entry = self._storages.get(address)
        if entry is None:
            self._storages[address] = entry = [0, size]
            self.allocated_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        entry[0] += 1
        weakref.finalize(tensor, self._dropped, address).atexit = False

    def _dropped(self, address: int) -> None:
        entry = self._storages[address]
        entry[0] -= 1
        if not entry[0]:
            del self._storages[address]
            self.allocated_bytes -= entry[1]


DEVICE = Device()


def poison(tensor: Tensor) -> None:
    """What memory holds that nobody wrote: NaN, or integers that fit no index."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.fill_(limits.min // 2 or limits.max)


def same_bits(one: Tensor, two: Tensor) -> bool:
    one, two = (x.contiguous().reshape(-1).view(torch.uint8) for x in (one, two))
    return torch.equal(one, two)


@cache
def _label(filename: str) -> str | None:
    path = Path(filename)
    if not path.is_relative_to(_ROOT):
        return None
    inner = path.relative_to(_ROOT)
    machinery = inner.parts[:2] == ("tests", "pretended") and not inner.name.startswith("test_")
    return None if machinery or inner.parts[0].startswith(".") else str(inner)


def line() -> str:
    """Where in our source this happens, innermost first: a test's line counts where there is no other."""
    ours: list[str] = []
    tests: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(ours) < _DEPTH:
        label = _label(frame.f_code.co_filename)
        if label is not None:
            (tests if label.startswith("tests/") else ours).append(f"{label}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(ours or tests[:1]) or "autograd"
