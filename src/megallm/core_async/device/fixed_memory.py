"""Device memory that can be given back to the driver and taken again at the same addresses.

By CUDA's virtual memory management (CUDA C++ Programming Guide, "Virtual Memory Management"): a range of
addresses is kept for good, physical memory is mapped to it and unmapped. What a CUDA graph reads is where it
was, so graphs outlive a sleep. Calls the driver through ctypes; knows bytes, no cache.
"""

import ctypes
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any, Protocol

import torch
from torch import Tensor

from megallm.core_async.errors import DeviceMemoryError

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_HAS_VIRTUAL_MEMORY = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""


class _Location(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(Structure):
    _fields_ = (
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Properties(Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("flags", _Flags),
    )


class _Access(Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


class Driver(Protocol):
    """The calls of the CUDA driver that are used; each raises DeviceMemoryError with the driver's code."""

    def granularity(self) -> int:
        """Gives the size that ranges are multiples of."""
        ...

    def reserve(self, num_bytes: int) -> int:
        """Keeps a range of addresses."""
        ...

    def map(self, address: int, num_bytes: int) -> None:
        """Puts new physical memory behind a range."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Takes it away, back to the driver."""
        ...

    def free(self, address: int, num_bytes: int) -> None:
        """Gives the range back."""
        ...


class CudaDriver:
    """The driver of one device."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # a context is there from now on
            index = torch.cuda.current_device()
        # Any: a library's functions have no types
        self._library: Any = ctypes.CDLL("libcuda.so.1")
        self._location = _Location(_ON_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=self._location)

    def has_virtual_memory(self) -> bool:
        """Says whether the device has what this needs."""
        has = c_int()
        self._call("cuDeviceGetAttribute", byref(has), c_int(_HAS_VIRTUAL_MEMORY), c_int(self._location.id))
        return bool(has.value)

    def granularity(self) -> int:
        """See `Driver.granularity`."""
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._properties), c_int(0))
        return size.value

    def reserve(self, num_bytes: int) -> int:
        """See `Driver.reserve`."""
        address = c_uint64()
        self._call(
            "cuMemAddressReserve", byref(address), c_size_t(num_bytes), c_size_t(0), c_uint64(0), c_uint64(0)
        )
        return address.value

    def map(self, address: int, num_bytes: int) -> None:
        """See `Driver.map`."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), c_size_t(num_bytes), byref(self._properties), c_uint64(0))
        try:
            self._call("cuMemMap", c_uint64(address), c_size_t(num_bytes), c_size_t(0), handle, c_uint64(0))
            access = _Access(self._location, _READ_WRITE)
            self._call("cuMemSetAccess", c_uint64(address), c_size_t(num_bytes), byref(access), c_size_t(1))
        finally:
            # the mapping holds the memory from now on, and unmapping it frees it
            self._call("cuMemRelease", handle)

    def unmap(self, address: int, num_bytes: int) -> None:
        """See `Driver.unmap`."""
        self._call("cuMemUnmap", c_uint64(address), c_size_t(num_bytes))

    def free(self, address: int, num_bytes: int) -> None:
        """See `Driver.free`."""
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(num_bytes))

    def _call(self, name: str, *arguments: object) -> None:
        code: int = getattr(self._library, name)(*arguments)
        if code:
            text = POINTER(ctypes.c_char)()
            self._library.cuGetErrorString(c_int(code), byref(text))
            said = ctypes.string_at(text).decode() if text else "no text"
            raise DeviceMemoryError(f"{name} failed with code {code}: {said}")


class FixedMemory:
    """A range of addresses, with memory behind it or not. Belongs to one cache, on one thread."""

    def __init__(self, num_bytes: int, driver: Driver) -> None:
        unit = driver.granularity()
        self._num_bytes = -(-num_bytes // unit) * unit
        self._driver = driver
        self._address = driver.reserve(self._num_bytes)
        self._is_mapped = False

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Says where the bytes are, to whoever makes a tensor of them."""
        assert self._is_mapped, "the memory is given back"
        return {
            "shape": (self._num_bytes,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 3,
        }

    def tensor(self, device: torch.device) -> Tensor:
        """Gives the bytes as a tensor, to be used while memory is behind them; it holds this object."""
        return torch.as_tensor(self, device=device)

    def take(self) -> None:
        """Takes memory from the driver. Raises: DeviceMemoryError where there is not so much."""
        if not self._is_mapped:
            self._driver.map(self._address, self._num_bytes)
            self._is_mapped = True

    def give_back(self) -> None:
        """Gives the memory to the driver; nothing on the device may still be using it."""
        if self._is_mapped:
            self._driver.unmap(self._address, self._num_bytes)
            self._is_mapped = False

    def close(self) -> None:
        """Gives memory and addresses back; a second call finds nothing to do."""
        self.give_back()
        if self._address:
            self._driver.free(self._address, self._num_bytes)
            self._address = 0


def reserved(num_bytes: int, device: torch.device) -> FixedMemory | None:
    """Gives a range of addresses of a device; None where its driver has no virtual memory."""
    driver = CudaDriver(device)
    return FixedMemory(num_bytes, driver) if driver.has_virtual_memory() else None
