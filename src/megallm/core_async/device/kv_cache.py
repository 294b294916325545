"""The paged cache: keys and values of every attention layer in blocks of equal size.

Knows tensors, and the arithmetic of blocks and slots; does not know which row owns which block.
Slot `block * block_size + offset` holds one token. What was never written means nothing: our kernels hide
the scores of such keys and read no such values; flash-attn weighs both with zero, so on a GPU they start as
zeros, and not as NaN.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from megallm.core_async.device.fixed_memory import FixedMemory, reserved
from megallm.core_async.device.offload import HostBlocks


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Gives how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def slots_for(
    block_tables: NDArray[np.int32],
    rows: NDArray[np.int32] | NDArray[np.int64],
    positions: NDArray[np.int32],
    block_size: int,
) -> NDArray[np.int32]:
    """Gives the slot of each (row, position) pair, through the table of each row's blocks."""
    return block_tables[rows, positions // block_size] * np.int32(block_size) + positions % block_size


class CacheShape(Struct, frozen=True):
    """What one layer keeps of a token."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int


class LayerCache:
    """One layer's keys and values, `[num_blocks, block_size, num_kv_heads, head_dim]`.

    The tensors belong to the cache and are replaced when it is released and restored: take them
    from here at each use.
    """

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._flat_keys: Tensor | None = None
        self._flat_values: Tensor | None = None

    def place(self, keys: Tensor | None, values: Tensor | None) -> None:
        """Takes the tensors that hold the layer's blocks; None while there are none."""
        self._keys, self._values = keys, values
        self._flat_keys = None if keys is None else keys.flatten(0, 1)
        self._flat_values = None if values is None else values.flatten(0, 1)

    @property
    def keys(self) -> Tensor:
        """The keys by block."""
        assert self._keys is not None, "the cache is released"
        return self._keys

    @property
    def values(self) -> Tensor:
        """The values by block."""
        assert self._values is not None, "the cache is released"
        return self._values

    @property
    def flat_keys(self) -> Tensor:
        """The keys by slot: `[num_blocks * block_size, num_kv_heads, head_dim]`, the same memory."""
        assert self._flat_keys is not None, "the cache is released"
        return self._flat_keys

    @property
    def flat_values(self) -> Tensor:
        """The values by slot, the same memory."""
        assert self._flat_values is not None, "the cache is released"
        return self._flat_values

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Puts one key and value per token, `[tokens, num_kv_heads, head_dim]`, into `slots` (int64)."""
        self.flat_keys.index_copy_(0, slots, key)
        self.flat_values.index_copy_(0, slots, value)


class PagedCache:
    """All layers' blocks. Owns the memory; `layers` stay the same objects for the cache's life."""

    def __init__(
        self,
        shapes: Sequence[CacheShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_scratch: int = 0,
        host: HostBlocks | None = None,
    ) -> None:
        """`num_scratch`: blocks after the others, for rows that fill up a batch and mean nothing.

        `host`: where kept contents go when the memory is released, and the cache's from then on; without it
        as the device needs it.
        """
        self.num_blocks = num_blocks
        self._num_scratch = num_scratch
        self.block_size = block_size
        self.layers = [LayerCache() for _ in shapes]
        self._shapes = list(shapes)
        self._dtype = dtype
        self._device = device
        self._host = HostBlocks(is_pinned=True) if host is None and device.type == "cuda" else host
        """None on a CPU: what is kept stays where it is."""
        self._kept: list[tuple[Tensor, Tensor]] | None = None
        self._memory: FixedMemory | None = None

    @property
    def keeps_addresses(self) -> bool:
        """Released and restored, the layers' tensors are where they were: CUDA graphs may go on."""
        return self._memory is not None

    @property
    def num_bytes(self) -> int:
        """Device bytes of the cache while it is allocated."""
        per_token = sum(
            shape.num_kv_heads * (shape.head_dim + shape.value_head_dim) for shape in self._shapes
        )
        return (self.num_blocks + self._num_scratch) * self.block_size * per_token * self._dtype.itemsize

    def allocate(self) -> None:
        """Takes the device memory; its contents mean nothing yet.

        Raises: DeviceMemoryError, or torch's own error, where there is not so much.
        """
        if self._device.type != "cuda":
            for layer, shapes in zip(self.layers, self._tensor_shapes(), strict=True):
                layer.place(*(torch.empty(shape, dtype=self._dtype, device=self._device) for shape in shapes))
            return
        if self._memory is None and self.layers:  # a stage of a pipeline may have no attention
            self._memory = reserved(self.num_bytes + _ALIGNMENT * 2 * len(self.layers), self._device)
        if self._memory is None:
            for layer, shapes in zip(self.layers, self._tensor_shapes(), strict=True):
                layer.place(*(torch.zeros(shape, dtype=self._dtype, device=self._device) for shape in shapes))
            return
        self._memory.take()
        self._place_in(self._memory.tensor(self._device).zero_())

    def release(self, kept: NDArray[np.int32]) -> None:
        """Gives the device memory back; what is in the `kept` blocks, each once, moves to host memory.

        What the others hold is lost. On a CPU nothing moves: where anything is to be kept, all stays.
        """
        assert not len(kept) or 0 <= kept.min() <= kept.max() < self.num_blocks, (
            f"blocks {kept.min()} to {kept.max()} are to be kept, of {self.num_blocks}"
        )
        self._kept = None
        if self._host is not None:
            self._host.drop()
        if len(kept):
            if self._host is None:
                self._kept = [(layer.keys, layer.values) for layer in self.layers]
            else:
                self._host.save(self._tensors(), kept)
        for layer in self.layers:
            layer.place(None, None)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a step may still read what is given back
            if self._memory is not None:
                self._memory.give_back()
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Takes the device memory again, with the contents that `release` kept."""
        kept, self._kept = self._kept, None
        if kept is not None:
            for layer, (keys, values) in zip(self.layers, kept, strict=True):
                layer.place(keys, values)
            return
        self.allocate()
        if self._host is not None:
            self._host.load(self._tensors())

    def close(self) -> None:
        """Gives everything back, the addresses too; may be called twice."""
        self.release(np.empty(0, dtype=np.int32))
        if self._host is not None:
            self._host.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]

    def _tensor_shapes(self) -> Iterator[tuple[torch.Size, torch.Size]]:
        """Yields the shapes of each layer's keys and values."""
        blocks = self.num_blocks + self._num_scratch
        for shape in self._shapes:
            kept = (blocks, self.block_size, shape.num_kv_heads)
            yield torch.Size((*kept, shape.head_dim)), torch.Size((*kept, shape.value_head_dim))

    def _place_in(self, memory: Tensor) -> None:
        """Lays the layers out in some bytes, one tensor after the other."""
        first = 0
        for layer, shapes in zip(self.layers, self._tensor_shapes(), strict=True):
            tensors: list[Tensor] = []
            for shape in shapes:
                num_bytes = shape.numel() * self._dtype.itemsize
                tensors.append(memory[first : first + num_bytes].view(self._dtype).view(shape))
                first += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            layer.place(*tensors)


_ALIGNMENT = 512
"""Bytes that a tensor's address is a multiple of, as torch's are."""
