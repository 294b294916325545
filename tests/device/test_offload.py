"""Blocks in host memory: what was taken comes back, however it was cut, and nothing is copied too early."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megallm.core_async.device.offload import Chunk, ChunkCopies, HostBlocks, Wait, chunks_of

DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


class LateCopies(ChunkCopies):
    """A device that does what is queued only when it is waited for, as a stream may.

    A chunk that is read before its wait, or written again before it, holds something else then.
    """

    def __init__(self, rows: Sequence[Tensor], blocks: Tensor, chunk_bytes: int) -> None:
        super().__init__(rows, blocks, chunk_bytes)
        self._queue: list[tuple[bool, Chunk, Tensor]] = []
        self._num_queued = 0

    def to_host(self, chunk: Chunk, host: Tensor) -> Wait:
        """See ChunkCopies."""
        host.fill_(0xEE)  # whatever was in it is not to be read any more
        return self._put(True, chunk, host)

    def to_device(self, chunk: Chunk, host: Tensor) -> Wait:
        """See ChunkCopies."""
        return self._put(False, chunk, host)

    def _put(self, *work: *tuple[bool, Chunk, Tensor]) -> Wait:
        self._queue.append(work)
        self._num_queued += 1
        number = self._num_queued

        def wait() -> None:
            while self._num_queued - len(self._queue) < number:
                is_to_host, chunk, host = self._queue.pop(0)
                (super(LateCopies, self).to_host if is_to_host else super(LateCopies, self).to_device)(
                    chunk, host
                )

        return wait


def tensors_of(shapes: Sequence[tuple[int, ...]], num_blocks: int, dtype: torch.dtype) -> list[Tensor]:
    """Gives tensors of random bytes, in one flat memory as a cache's are."""
    tensors: list[Tensor] = []
    generator = torch.Generator().manual_seed(num_blocks)
    for shape in shapes:
        whole = torch.Size((num_blocks, *shape))
        noise = torch.randint(
            0, 256, (whole.numel() * dtype.itemsize,), dtype=torch.uint8, generator=generator
        )
        tensors.append(noise.view(dtype).view(whole))
    return tensors


def bytes_of(tensor: Tensor, blocks: Sequence[int]) -> bytes:
    """Gives what is in some blocks, to the bit."""
    return b"".join(tensor[block].flatten().view(torch.uint8).numpy().tobytes() for block in blocks)


# ---- chunks --------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 40), max_size=6),
    st.integers(0, 30),
    st.integers(40, 200),
)
def test_chunks_hold_each_block_of_each_tensor_once_and_lie_without_gaps(
    widths: list[int], num_kept: int, chunk_bytes: int
) -> None:
    """A gap is a slower copy; a block that is nowhere is a wrong answer."""
    chunks = chunks_of(widths, num_kept, chunk_bytes)
    seen: list[tuple[int, int]] = []
    for chunk in chunks:
        end = 0
        for piece in chunk:
            assert piece.start == end
            assert piece.num_bytes == (piece.stop - piece.first) * widths[piece.tensor] > 0
            end += piece.num_bytes
            seen += [(piece.tensor, place) for place in range(piece.first, piece.stop)]
        assert end <= chunk_bytes
    assert seen == [(tensor, place) for tensor in range(len(widths)) for place in range(num_kept)]
    for chunk, after in pairwise(chunks):
        assert chunk[-1].start + chunk[-1].num_bytes + widths[after[0].tensor] > chunk_bytes


# ---- there and back ------------------------------------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Draws keys and values of some layers: heads and dims of their own, an empty one among them."""
    sizes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))
    return draw(st.lists(sizes, max_size=5))


@settings(deadline=None)
@given(
    shapes=shapes(),
    num_blocks=st.integers(1, 12),
    trips=st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=3),
    chunk_bytes=st.integers(1, 300),
    max_pinned_bytes=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
    is_late=st.booleans(),
)
def test_kept_blocks_come_back_and_nothing_else_is_written(
    *,
    shapes: list[tuple[int, ...]],
    num_blocks: int,
    trips: list[set[int]],
    chunk_bytes: int,
    max_pinned_bytes: int,
    dtype: torch.dtype,
    is_late: bool,
) -> None:
    """To the bit, whatever the chunk, in pinned memory or through it, and again in the same memory."""
    host = HostBlocks(
        is_pinned=False,
        chunk_bytes=chunk_bytes,
        max_pinned_bytes=max_pinned_bytes,
        copies=LateCopies if is_late else ChunkCopies,
    )
    for trip, chosen in enumerate(trips):
        before = tensors_of(shapes, num_blocks + trip, dtype)
        kept = np.array(sorted(block for block in chosen if block < num_blocks)[::-1], dtype=np.int32)
        lost = sorted(set(range(num_blocks)) - set(kept.tolist()))
        host.save(before, kept)
        after = [torch.zeros_like(tensor) for tensor in before]
        host.load(after)
        for old, new in zip(before, after, strict=True):
            assert bytes_of(old, kept.tolist()) == bytes_of(new, kept.tolist())
            assert not any(bytes_of(new, lost))


def test_a_device_that_is_late_is_seen_by_whoever_does_not_wait() -> None:
    """Else the test above would show nothing of the order."""
    tensors = tensors_of([(3,)], 4, torch.int64)
    copies = LateCopies([tensors[0]], torch.arange(4), 96)
    (chunk,) = chunks_of([24], 4, 96)
    host = torch.zeros(96, dtype=torch.uint8)
    wait = copies.to_host(chunk, host)
    assert bool((host == 0xEE).all())
    wait()
    assert host.numpy().tobytes() == bytes_of(tensors[0], range(4))


# ---- what it costs -------------------------------------------------------------------------------


def test_pinned_memory_is_kept_and_pageable_memory_is_not() -> None:
    """Pinning takes longer than the copy; an engine that is awake keeps no RAM that grows with its cache."""
    tensors = tensors_of([(8, 8)], 100, torch.uint8)  # 64 bytes a block
    host = HostBlocks(is_pinned=False, chunk_bytes=128, max_pinned_bytes=4 * 128)
    assert host.num_bytes == 0
    sizes: list[tuple[int, int]] = []
    for num_kept in (2, 100, 3, 100, 50):
        host.save(tensors, np.arange(num_kept, dtype=np.int32))
        asleep = host.num_bytes
        host.load(tensors)
        sizes.append((asleep // 128, host.num_bytes // 128))
    assert sizes == [(1, 1), (52, 6), (6, 6), (52, 6), (27, 6)]
    host.close()
    host.close()
    assert host.num_bytes == 0


def test_two_hundred_cycles_take_no_more_memory_than_a_hundred() -> None:
    """An RL run makes thousands of them."""
    tensors = tensors_of([(4, 4), (2, 4)], 30, torch.float32)
    host = HostBlocks(is_pinned=False, chunk_bytes=300, max_pinned_bytes=900)
    rng = np.random.default_rng(0)
    most = 0
    for cycle in range(200):
        host.save(tensors, rng.permutation(30)[: rng.integers(0, 31)].astype(np.int32))
        host.load(tensors)
        if cycle == 100:
            most = host.num_bytes
    assert host.num_bytes == most == 300 * 5


def test_contents_are_loaded_once_and_those_that_are_dropped_never() -> None:
    """A later cycle that keeps nothing must not find what an earlier one kept."""
    tensors = tensors_of([(4,)], 3, torch.uint8)
    zeros = [torch.zeros_like(tensors[0])]
    kept = np.array([0, 2], dtype=np.int32)
    host = HostBlocks(is_pinned=False, chunk_bytes=8, max_pinned_bytes=0)
    host.save(tensors, kept)
    host.drop()
    host.load(zeros)
    assert not zeros[0].any()
    host.save(tensors, kept)
    host.save(tensors, np.array([], dtype=np.int32))
    host.load(zeros)
    assert not zeros[0].any()
    host.save(tensors, kept)
    host.load(zeros)
    zeros[0].zero_()
    host.load(zeros)
    assert not zeros[0].any()


def test_a_block_wider_than_a_chunk_makes_chunks_of_its_size() -> None:
    """A long block of many heads is no reason to fail; one that comes later would not fit what there is."""
    tensors = tensors_of([(2,), (7, 10)], 3, torch.uint8)
    host = HostBlocks(is_pinned=False, chunk_bytes=16, max_pinned_bytes=1 << 20)
    host.save(tensors, np.array([1], dtype=np.int32))
    assert host.num_bytes == 2 * 70
    with pytest.raises(AssertionError, match="a block has 90 bytes"):
        host.save(tensors_of([(90,)], 3, torch.uint8), np.array([1], dtype=np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("max_pinned_bytes", [0, 3 << 20, 1 << 30])
def test_blocks_of_a_device_come_back_from_pinned_memory(max_pinned_bytes: int) -> None:
    """The same with real streams and events, through lanes and without them."""
    shapes = [(16, 8, 128), (16, 8, 64), (16, 1, 576)]
    before = [tensor.cuda() for tensor in tensors_of(shapes, 300, torch.bfloat16)]
    host = HostBlocks(is_pinned=True, chunk_bytes=1 << 20, max_pinned_bytes=max_pinned_bytes)
    for num_kept in (1, 7, 250, 300):
        kept = np.random.default_rng(num_kept).permutation(300)[:num_kept].astype(np.int32)
        host.save(before, kept)
        after = [torch.zeros_like(tensor) for tensor in before]
        host.load(after)
        for old, new in zip(before, after, strict=True):
            assert bytes_of(old.cpu(), kept.tolist()) == bytes_of(new.cpu(), kept.tolist())
            assert int(new.flatten(1).view(torch.int64).ne(0).any(1).sum()) == num_kept
    host.close()
    assert host.num_bytes == 0
