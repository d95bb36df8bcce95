"""Device memory whose address outlives its contents: CUDA's virtual memory management through the driver's C API.

Owns a reserved range of addresses and the physical memory behind it. `unmap` returns the memory to the device and keeps
the range; `map` puts fresh memory there. Captured graphs that use the range thus stay valid. Independent of tensors.
Before `unmap`, the caller waits for all users of the range.
"""

import ctypes
from typing import Any

_PINNED, _ON_DEVICE, _READ_WRITE, _RECOMMENDED = 1, 1, 3, 1
_LIBRARY = "libcuda.so.1"


class VirtualMemoryError(RuntimeError):
    """The driver refused or is missing; the message names the call and the reason."""


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class MappedRange(ctypes.Structure):
    """CUmemAllocationProp of the driver API."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handle_kinds", ctypes.c_int),
        ("location", _Location),
        ("windows_metadata", ctypes.c_void_p),
        ("flags", _Flags),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc of the driver API."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """The driver's calls with plain numbers; every refusal is a VirtualMemoryError."""

    def __init__(self, library: Any = None) -> None:
        """library: an object with the driver's C functions; default: the installed one."""
        if library is None:
            try:
                library = ctypes.CDLL(_LIBRARY)
            except OSError as error:
                raise VirtualMemoryError(f"{_LIBRARY} is not there: {error}") from None
        self._library = library

    def granularity(self, device: int) -> int:
        size = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(size),
            ctypes.byref(_pinned(device)),
            ctypes.c_int(_RECOMMENDED),
        )
        return size.value

    def reserve(self, size_bytes: int) -> int:
        address = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size_bytes), zero, zero, zero)
        return address.value

    def create(self, size_bytes: int, device: int) -> int:
        handle = ctypes.c_uint64()
        self._call(
            "cuMemCreate",
            ctypes.byref(handle),
            ctypes.c_size_t(size_bytes),
            ctypes.byref(_pinned(device)),
            ctypes.c_uint64(0),
        )
        return handle.value

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        zero = ctypes.c_uint64(0)
        self._call(
            "cuMemMap", ctypes.c_uint64(address), ctypes.c_size_t(size_bytes), zero, ctypes.c_uint64(handle), zero
        )

    def allow(self, address: int, size_bytes: int, device: int) -> None:
        access = Access(_Location(_ON_DEVICE, device), _READ_WRITE)
        self._call(
            "cuMemSetAccess",
            ctypes.c_uint64(address),
            ctypes.c_size_t(size_bytes),
            ctypes.byref(access),
            ctypes.c_size_t(1),
        )

    def unmap(self, address: int, size_bytes: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def free(self, address: int, size_bytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise VirtualMemoryError(f"the driver has no {name}") from None
        code = function(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            reason = (text.value or b"unknown").decode(errors="replace")
            raise VirtualMemoryError(f"{name} failed with {code}: {reason}")


class VirtualMemory:
    """`size_bytes` of one device at `address`, mapped from the start. After a refusal nothing stays allocated."""

    def __init__(self, size_bytes: int, device: int, driver: CudaDriver) -> None:
        """Raises VirtualMemoryError."""
        self._driver, self._device = driver, device
        step = driver.granularity(device)
        self.size_bytes = -(-size_bytes // step) * step
        self._handle: int | None = None
        self.address = driver.reserve(self.size_bytes)
        try:
            self.map()
        except VirtualMemoryError:
            driver.free(self.address, self.size_bytes)
            raise

    @property
    def mapped(self) -> bool:
        return self._handle is not None

    def map(self) -> None:
        """Map uninitialised memory to the range. Raises VirtualMemoryError and stays unmapped; the call can be retried,
        since others may hold the device's memory."""
        if self._handle is not None:
            return
        driver = self._driver
        handle = driver.create(self.size_bytes, self._device)
        try:
            driver.map(self.address, self.size_bytes, handle)
            try:
                driver.allow(self.address, self.size_bytes, self._device)
            except VirtualMemoryError:
                driver.unmap(self.address, self.size_bytes)
                raise
        except VirtualMemoryError:
            driver.release(handle)
            raise
        self._handle = handle

    def unmap(self) -> None:
        """Release the memory; the range stays reserved."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        self._driver.unmap(self.address, self.size_bytes)
        self._driver.release(handle)

    def close(self) -> None:
        """Release memory and range. Nothing may use the address afterwards."""
        self.unmap()
        if self.address:
            self._driver.free(self.address, self.size_bytes)
            self.address = 0


def _pinned(device: int) -> MappedRange:
    return MappedRange(kind=_PINNED, location=_Location(_ON_DEVICE, device))
