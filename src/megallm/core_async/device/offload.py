"""Contents of blocks in host memory, while the cache has no memory on the device.

Knows tensors whose first dimension is the block; does not know what they hold, nor whose a block is.

How they get there, and why. Only the blocks that somebody may still read are taken, so what is taken is
often little of a big cache. It is gathered on the device into one chunk after the other (one gather for each
tensor, however scattered its blocks are), and each chunk is one copy between the device and pinned memory,
which alone runs at the full speed of PCIe and beside the CPU. Pinned memory takes far longer to get than
to fill (pages are locked at 1 to 3 GB/s), and takes RAM from everyone else: so it is kept from one cycle to
the next, and is never more than `MAX_PINNED_BYTES` and two chunks. What is beyond that goes on to pageable
memory by way of two pinned chunks in turn, the CPU copying the one while the device fills the other: the
speed of memcpy, which is torch's, with all its threads. Pageable memory is given back when the contents are
on the device again: an engine that is awake keeps no RAM that grows with its cache.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

CHUNK_BYTES: Final = 32 << 20
"""Enough that a copy's start costs nothing; and the device has to have so much beside the cache."""
MAX_PINNED_BYTES: Final = 4 << 30

type Wait = Callable[[], object]
"""Waits until what was queued has been done, and all that was queued before it."""


class Piece(Struct, frozen=True):
    """A run of one tensor's kept blocks in a chunk."""

    tensor: int
    first: int
    """Place of its first block among those that are kept; `stop` is that after its last."""
    stop: int
    start: int
    """Byte of the chunk that it begins at."""
    num_bytes: int


type Chunk = list[Piece]


def chunks_of(widths: Sequence[int], num_kept: int, chunk_bytes: int) -> list[Chunk]:
    """Lays out so many blocks of each tensor in chunks, one tensor after the other, without gaps.

    `widths`: bytes of a block of each tensor, from 1 to `chunk_bytes`. No block is divided.
    """
    chunks: list[Chunk] = []
    room = 0
    for tensor, width in enumerate(widths):
        first = 0
        while first < num_kept:
            if room < width:
                chunks.append([])
                room = chunk_bytes
            count = min(num_kept - first, room // width)
            chunks[-1].append(Piece(tensor, first, first + count, chunk_bytes - room, count * width))
            room -= count * width
            first += count
    return chunks


class ChunkCopies:
    """Queues the copies of chunks between blocks on a device and host memory, in order.

    Everything goes through one chunk of the device's memory, on the current stream: each gather comes after
    the copy before it.
    """

    def __init__(self, rows: Sequence[Tensor], blocks: Tensor, chunk_bytes: int) -> None:
        """`rows`: `[num_blocks, words]` each, of one dtype; `blocks`: those kept, int64, on their device."""
        self._rows = rows
        self._blocks = blocks
        self._staging = torch.empty(chunk_bytes, dtype=torch.uint8, device=blocks.device)

    def to_host(self, chunk: Chunk, host: Tensor) -> Wait:
        """Copies a chunk's blocks to `host`, uint8, which is whole once the wait is over."""
        for piece in chunk:
            rows = self._rows[piece.tensor]
            torch.index_select(rows, 0, self._blocks[piece.first : piece.stop], out=self._part(piece, rows))
        num_bytes = _bytes_in(chunk)
        host[:num_bytes].copy_(self._staging[:num_bytes], non_blocking=True)
        return self._mark()

    def to_device(self, chunk: Chunk, host: Tensor) -> Wait:
        """Copies a chunk's blocks back from `host`, which may be written again once the wait is over."""
        num_bytes = _bytes_in(chunk)
        self._staging[:num_bytes].copy_(host[:num_bytes], non_blocking=True)
        for piece in chunk:
            rows = self._rows[piece.tensor]
            rows.index_copy_(0, self._blocks[piece.first : piece.stop], self._part(piece, rows))
        return self._mark()

    def _part(self, piece: Piece, rows: Tensor) -> Tensor:
        part = self._staging[piece.start : piece.start + piece.num_bytes]
        return part.view(rows.dtype).view(piece.stop - piece.first, -1)

    def _mark(self) -> Wait:
        if self._staging.device.type != "cuda":
            return _nothing
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._staging.device))
        return event.synchronize


class HostBlocks:
    """Contents of some blocks of some tensors, from `save` to `load`. Belongs to one cache, on one thread.

    The tensors are contiguous, of the same shapes at every call.
    """

    def __init__(
        self,
        *,
        is_pinned: bool,
        chunk_bytes: int = CHUNK_BYTES,
        max_pinned_bytes: int = MAX_PINNED_BYTES,
        copies: Callable[[Sequence[Tensor], Tensor, int], ChunkCopies] = ChunkCopies,
    ) -> None:
        """`is_pinned`: whether memory that is to be pinned is so, which needs a CUDA device."""
        self._is_pinned = is_pinned
        self._chunk_bytes = chunk_bytes
        self._max_pinned_bytes = max_pinned_bytes
        self._copies = copies
        self._pinned: list[Tensor] = []
        """Chunks that contents stay in, kept from one cycle to the next: the first of them all."""
        self._paged: list[Tensor] = []
        """The others, while there are contents."""
        self._lanes: list[Tensor] = []
        """The two pinned chunks that those go through."""
        self._blocks: NDArray[np.int32] | None = None

    @property
    def num_bytes(self) -> int:
        """Host bytes that are held, whether or not there is something in them."""
        return sum(len(chunk) for chunk in [*self._pinned, *self._paged, *self._lanes])

    def save(self, tensors: Sequence[Tensor], blocks: NDArray[np.int32]) -> None:
        """Takes the contents of `blocks`, each once, and waits until they are here; any before are lost.

        The chunk on the device is given back to torch's cache. Raises: torch's own errors, where the device
        or the host lacks memory.
        """
        self.drop()
        rows = _rows_of(tensors)
        if not rows or not len(blocks):
            return
        last: Wait = _nothing
        copies, chunks = self._ways(rows, blocks)
        for place, chunk in enumerate(chunks):
            home, lane = self._home(place), self._lane(place)
            wait = copies.to_host(chunk, lane)
            last()  # after the device has its next work
            last = partial(_arrive, wait, lane, home)
        last()
        self._blocks = blocks

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Puts the contents back where they were, and waits until they are there; none: does nothing."""
        if self._blocks is None:
            return
        waits: list[Wait] = []
        copies, chunks = self._ways(_rows_of(tensors), self._blocks)
        for place, chunk in enumerate(chunks):
            home, lane = self._home(place), self._lane(place)
            if lane is not home:
                if len(waits) > 1:
                    waits[-2]()  # the lane's last contents are on the device
                lane.copy_(home)
            waits.append(copies.to_device(chunk, lane))
        waits[-1]()
        self.drop()

    def drop(self) -> None:
        """Forgets the contents; the pinned memory stays for the next."""
        self._blocks = None
        self._paged.clear()

    def close(self) -> None:
        """Gives all memory back; may be called twice."""
        self.drop()
        self._pinned.clear()
        self._lanes.clear()
        if self._is_pinned:
            # else torch keeps it locked for the next to ask; it has no public name for this
            torch._C._host_emptyCache()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def _ways(self, rows: Sequence[Tensor], blocks: NDArray[np.int32]) -> tuple[ChunkCopies, list[Chunk]]:
        """Says which blocks go in which chunk, and gives what copies them."""
        widths = [part.shape[1] * part.itemsize for part in rows]
        chunk_bytes = max(self._chunk_bytes, *widths)
        assert chunk_bytes == self._chunk_bytes or not self.num_bytes, (
            f"a block has {chunk_bytes} bytes, more than in the chunks of {self._chunk_bytes} that were made"
        )
        self._chunk_bytes = chunk_bytes
        index = torch.from_numpy(blocks.astype(np.int64)).to(rows[0].device)
        return self._copies(rows, index, chunk_bytes), chunks_of(widths, len(blocks), chunk_bytes)

    def _home(self, place: int) -> Tensor:
        """Gives the chunk that the contents of a place stay in, a new one behind the last."""
        beyond = place - self._max_pinned
        chunks, place = (self._pinned, place) if beyond < 0 else (self._paged, beyond)
        if place == len(chunks):
            chunks.append(self._pinned_chunk() if beyond < 0 else self._paged_chunk())
        return chunks[place]

    def _lane(self, place: int) -> Tensor:
        """Gives the chunk that the device copies to and from, for a place."""
        if place < self._max_pinned:
            return self._pinned[place]
        if not self._lanes:
            self._lanes = [self._pinned_chunk(), self._pinned_chunk()]
        return self._lanes[place % 2]

    @property
    def _max_pinned(self) -> int:
        return self._max_pinned_bytes // self._chunk_bytes

    def _pinned_chunk(self) -> Tensor:
        return torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)

    def _paged_chunk(self) -> Tensor:
        # NumPy asks for huge pages, which are faster to fill
        return torch.from_numpy(np.empty(self._chunk_bytes, dtype=np.uint8))


def _rows_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gives the tensors that have anything as `[num_blocks, words]`, in the widest words that fit all."""
    parts = [tensor.flatten(1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    word = torch.int64 if all(part.shape[1] % torch.int64.itemsize == 0 for part in parts) else torch.uint8
    return [part.view(word) for part in parts]


def _bytes_in(chunk: Chunk) -> int:
    return chunk[-1].start + chunk[-1].num_bytes


def _arrive(wait: Wait, lane: Tensor, home: Tensor) -> None:
    """Takes a chunk from its lane, once it is whole."""
    wait()
    if lane is not home:
        home.copy_(lane)


def _nothing() -> None:
    """Waits for nothing."""
