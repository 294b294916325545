"""Memory behind a range of addresses, with a driver of counters; on a GPU with the real one."""

import pytest
import torch

from megallm.core_async.device.fixed_memory import CudaDriver, FixedMemory
from megallm.core_async.errors import DeviceMemoryError

MIB = 1 << 20


class CountingDriver:
    """A driver that knows what is reserved and what is mapped."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}

    def granularity(self) -> int:
        return 16

    def reserve(self, num_bytes: int) -> int:
        self.reserved[4096] = num_bytes
        return 4096

    def map(self, address: int, num_bytes: int) -> None:
        if num_bytes > self.room:
            raise DeviceMemoryError("full")
        self.mapped[address] = num_bytes

    def unmap(self, address: int, num_bytes: int) -> None:
        assert self.mapped.pop(address) == num_bytes

    def free(self, address: int, num_bytes: int) -> None:
        assert self.reserved.pop(address) == num_bytes


def test_memory_comes_and_goes_and_the_address_stays() -> None:
    """A graph reads what is at the address, whenever it is replayed."""
    driver = CountingDriver()
    memory = FixedMemory(33, driver)
    assert driver.reserved == {4096: 48}
    assert driver.mapped == {}
    for _ in range(2):
        memory.take()
        memory.take()
        assert driver.mapped == {4096: 48}
        assert memory.__cuda_array_interface__["data"] == (4096, False)
        memory.give_back()
        memory.give_back()
        assert driver.mapped == {}
    memory.take()
    memory.close()
    memory.close()
    assert (driver.mapped, driver.reserved) == ({}, {})


def test_no_tensor_is_made_of_memory_that_is_given_back() -> None:
    """Its first use would end the process's CUDA context."""
    with pytest.raises(AssertionError, match="given back"):
        _ = FixedMemory(8, CountingDriver()).__cuda_array_interface__


def test_memory_that_is_not_there_can_be_asked_for_again() -> None:
    """A trainer may free some before the next resume."""
    driver = CountingDriver(room=8)
    memory = FixedMemory(33, driver)
    with pytest.raises(DeviceMemoryError):
        memory.take()
    driver.room = 100
    memory.take()
    assert driver.mapped == {4096: 48}


@pytest.mark.gpu
def test_driver_lends_and_takes_back() -> None:
    """What is given back is free for others at once, and the tensor of before reads the new memory."""
    device = torch.device("cuda")
    driver = CudaDriver(device)
    assert driver.has_virtual_memory()
    memory = FixedMemory(256 * MIB, driver)
    assert int(torch.zeros(1, device=device).fill_(7)[0]) == 7  # the driver loads kernels at their first use
    before = torch.cuda.mem_get_info()[0]
    memory.take()
    tensor = memory.tensor(device)
    tensor.fill_(7)
    assert (int(tensor[0]), int(tensor[-1])) == (7, 7)
    assert before - torch.cuda.mem_get_info()[0] >= 256 * MIB
    torch.cuda.synchronize()
    memory.give_back()
    # torch keeps a little, and the driver for kernels
    assert before - torch.cuda.mem_get_info()[0] < 64 * MIB
    memory.take()
    tensor.fill_(9)
    assert int(tensor[-1]) == 9
    torch.cuda.synchronize()
    with pytest.raises(DeviceMemoryError, match="cuMemCreate failed"):
        FixedMemory(1 << 42, driver).take()  # more than any card has
    del tensor
    memory.close()
