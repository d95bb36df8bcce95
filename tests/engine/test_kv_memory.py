"""Memory whose address stays, over a driver that is pretended: order of calls, leaks, refusals; and who falls back."""

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from actors.engine.native.forward import kv_memory as module
from actors.engine.native.forward.kv_memory import AllocatedMemory, MappedMemory, kv_memory
from actors.engine.native.forward.virtual_memory import CudaDriver, VirtualMemory, VirtualMemoryError

STEP = 2 << 20
SIZE = STEP + 5


class Library:
    """The driver's C functions over host memory, as ctypes calls them. Keeps what a device would: ranges, handles,
    mappings; refuses what the driver would."""

    def __init__(self, fail: str = "") -> None:
        self.fail, self.calls = fail, list[str]()
        self.ranges: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.allowed: set[int] = set()
        self._memory: list[Any] = []
        self._next = 40

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu") or not hasattr(type(self), f"on_{name.lower()}"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name != "cuGetErrorString":
                self.calls.append(name)
                if name == self.fail:
                    return 2
            return int(getattr(self, f"on_{name.lower()}")(*arguments) or 0)

        return call

    def on_cugeterrorstring(self, code: Any, text: Any) -> None:
        text._obj.value = b"out of memory"

    def on_cumemgetallocationgranularity(self, size: Any, what: Any, option: Any) -> None:
        assert (what._obj.kind, what._obj.location.kind, what._obj.location.number) == (1, 1, 3)
        size._obj.value = STEP

    def on_cumemaddressreserve(self, address: Any, size: Any, *rest: Any) -> None:
        assert size.value % STEP == 0
        memory = ctypes.create_string_buffer(size.value)
        self._memory.append(memory)
        address._obj.value = ctypes.addressof(memory)
        self.ranges[address._obj.value] = size.value

    def on_cumemcreate(self, handle: Any, size: Any, what: Any, flags: Any) -> None:
        self._next += 1
        handle._obj.value = self._next
        self.handles[self._next] = size.value

    def on_cumemmap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        if self.ranges[address.value] != size.value or address.value in self.mapped:
            return 1
        self.mapped[address.value] = handle.value
        return 0

    def on_cumemsetaccess(self, address: Any, size: Any, access: Any, count: Any) -> None:
        assert address.value in self.mapped
        assert (access._obj.location.number, access._obj.flags, count.value) == (3, 3, 1)
        self.allowed.add(address.value)

    def on_cumemunmap(self, address: Any, size: Any) -> None:
        del self.mapped[address.value]
        self.allowed.discard(address.value)

    def on_cumemrelease(self, handle: Any) -> None:
        assert handle.value not in self.mapped.values(), "the memory would stay alive"
        del self.handles[handle.value]

    def on_cumemaddressfree(self, address: Any, size: Any) -> None:
        assert address.value not in self.mapped
        assert self.ranges.pop(address.value) == size.value


def test_the_address_outlives_the_memory() -> None:
    library = Library()
    memory = VirtualMemory(SIZE, 3, CudaDriver(library))
    address = memory.address
    assert memory.size_bytes == 2 * STEP
    for _ in range(2):
        assert library.allowed == {address}
        assert list(library.handles.values()) == [2 * STEP]
        memory.unmap()
        memory.unmap()
        assert (library.mapped, library.handles, list(library.ranges)) == ({}, {}, [address])
        memory.map()
        memory.map()
        assert memory.address == address
    memory.close()
    memory.close()
    assert (library.mapped, library.handles, library.ranges) == ({}, {}, {})
    made = ["cuMemCreate", "cuMemMap", "cuMemSetAccess"]
    gone = ["cuMemUnmap", "cuMemRelease"]
    first = ["cuMemGetAllocationGranularity", "cuMemAddressReserve"]
    assert library.calls == [*first, *(made + gone) * 2, *made, *gone, "cuMemAddressFree"]


@pytest.mark.parametrize(
    "fail", ["cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"]
)
def test_a_refusal_leaves_nothing_behind_and_says_which_call(fail: str) -> None:
    library = Library(fail)
    with pytest.raises(VirtualMemoryError, match=f"{fail} failed with 2: out of memory"):
        VirtualMemory(SIZE, 3, CudaDriver(library))
    assert (library.mapped, library.handles, library.ranges) == ({}, {}, {})


@pytest.mark.parametrize("fail", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_refused_wake_may_be_tried_again(fail: str) -> None:
    """Others may still hold the device's memory."""
    library = Library()
    memory = VirtualMemory(SIZE, 3, CudaDriver(library))
    memory.unmap()
    library.fail = fail
    with pytest.raises(VirtualMemoryError):
        memory.map()
    assert not memory.mapped
    assert (library.mapped, library.handles) == ({}, {})
    library.fail = ""
    memory.map()
    assert library.allowed == {memory.address}


def test_an_old_driver_is_refused_by_name() -> None:
    class Old:
        pass

    with pytest.raises(VirtualMemoryError, match="the driver has no cuMemGetAllocationGranularity"):
        VirtualMemory(SIZE, 3, CudaDriver(Old()))


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch takes the pretended range over as host memory. What was asked of torch.cuda comes back."""
    asked: list[str] = []

    def as_tensor(place: Any, device: Any) -> torch.Tensor:
        (address, _), (size,) = place.__cuda_array_interface__["data"], place.__cuda_array_interface__["shape"]
        tensor = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
        tensor.place = place  # type: ignore[attr-defined]
        return tensor

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty_cache"))
    return asked


def test_a_mapped_cache_sleeps_and_wakes_in_place(on_host: list[str]) -> None:
    library = Library()
    memory = MappedMemory(SIZE, torch.device("cuda", 3), CudaDriver(library))
    address = memory.tensor.data_ptr()
    assert memory.tensor.shape == (SIZE,)
    memory.sleep()
    assert on_host == ["synchronize"], "nothing may still write there"
    assert not library.handles
    library.fail = "cuMemCreate"
    with pytest.raises(VirtualMemoryError):
        memory.wake()
    assert on_host[-1] == "empty_cache", "torch gives back what it holds, then once more"
    library.fail = ""
    memory.tensor.fill_(7)
    assert memory.wake() is True
    assert memory.tensor.data_ptr() == address
    assert not memory.tensor.any()


def test_a_cache_that_nobody_uses_gives_memory_and_addresses_back(on_host: list[str]) -> None:
    library = Library()
    memory = MappedMemory(SIZE, torch.device("cuda", 3), CudaDriver(library))
    part = memory.tensor[:8]
    del memory
    gc.collect()
    assert library.handles, "a tensor over it is still there"
    place = part._base
    del part, place
    gc.collect()
    assert (library.mapped, library.handles, library.ranges) == ({}, {}, {})


@pytest.mark.parametrize("fail", ["cuMemAddressReserve", "cuMemSetAccess"])
def test_a_refusing_driver_costs_the_addresses_and_is_told(
    fail: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "AllocatedMemory", lambda size, device, keep_bytes=0: (size, keep_bytes))
    found: Any = kv_memory(SIZE, torch.device("cuda", 3), CudaDriver(Library(fail)))
    assert found == (SIZE, module.SMALL_BYTES)
    assert "will not survive sleep" in caplog.text
    assert fail in caplog.text


def test_without_a_driver_library_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(module, "AllocatedMemory", lambda size, device, keep_bytes=0: size)
    result: Any = kv_memory(SIZE, torch.device("cuda", 3))
    assert result == SIZE
    assert "libcuda.so.1 is not there" in caplog.text


def test_on_a_cpu_a_part_of_what_a_container_may_use_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "total_bytes", lambda: 64 * module.SMALL_SHARE)
    for size, stays in ((64, True), (65, False)):
        memory = kv_memory(size, torch.device("cpu"))
        memory.sleep()
        assert memory.wake() is stays


def test_allocated_memory_moves_unless_it_is_small() -> None:
    small, large = (AllocatedMemory(size, torch.device("cpu"), keep_bytes=64) for size in (64, 65))
    for memory, stays in ((small, True), (large, False)):
        memory.tensor.fill_(3)
        memory.sleep()
        assert memory.wake() is stays
        assert bool(memory.tensor.any()) is stays
        assert memory.wake() is True, "it did not sleep"
