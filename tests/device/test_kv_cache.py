"""Blocks, slots, and the memory behind them."""

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.device.kv_cache import (
    CacheShape,
    PagedCache,
    num_blocks_for,
    slots_for,
)
from megallm.core_async.device.offload import HostBlocks

SHAPES = [CacheShape(num_kv_heads=2, head_dim=4, value_head_dim=6), CacheShape(1, 8, 8)]


def cache(host: HostBlocks | None = None) -> PagedCache:
    """Gives a cache of two unlike layers, 5 blocks of 3 tokens and a scratch block."""
    paged = PagedCache(
        SHAPES,
        num_blocks=5,
        block_size=3,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_scratch=1,
        host=host,
    )
    paged.allocate()
    return paged


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_blocks_hold_their_tokens_and_none_is_spare(num_tokens: int, block_size: int) -> None:
    """One block too few writes over a neighbour's cache."""
    blocks = num_blocks_for(num_tokens, block_size)
    assert blocks * block_size >= num_tokens > (blocks - 1) * block_size or num_tokens == blocks == 0


def test_slot_is_the_place_in_the_block_that_the_table_names() -> None:
    """Position 4 of a row whose blocks of 3 are 7, 2 is the second slot of block 2."""
    tables = np.array([[7, 2, 5], [1, 0, 9]], dtype=np.int32)
    rows = np.array([0, 0, 1, 1], dtype=np.int32)
    positions = np.array([0, 4, 8, 3], dtype=np.int32)
    assert slots_for(tables, rows, positions, 3).tolist() == [21, 7, 29, 0]


def test_written_tokens_lie_in_their_slots_and_nowhere_else() -> None:
    """The block view and the slot view are one memory."""
    layer = cache().layers[0]
    layer.keys.fill_(-1)
    key, value = torch.randn(2, 2, 4), torch.randn(2, 2, 6)
    layer.write(key, value, torch.tensor([7, 3]))
    assert layer.keys[2, 1].equal(key[0])
    assert layer.keys[1, 0].equal(key[1])
    assert layer.values[2, 1].equal(value[0])
    assert int((layer.flat_keys == -1).all(-1).all(-1).sum()) == 16


def test_bytes_are_those_of_the_tensors() -> None:
    """The number of blocks is derived from them."""
    paged = cache()
    tensors = [tensor for layer in paged.layers for tensor in (layer.keys, layer.values)]
    assert paged.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


EVERY_BLOCK = np.arange(5, dtype=np.int32)
NO_BLOCK = np.empty(0, dtype=np.int32)


@pytest.mark.parametrize("keeps", [True, False])
def test_released_cache_comes_back_and_the_layers_stay_the_same_objects(keeps: bool) -> None:  # noqa: FBT001
    """The bound model holds the layers; contents come back only where that was asked."""
    paged = cache()
    layers = list(paged.layers)
    for layer in layers:
        layer.values.fill_(3)
    paged.release(EVERY_BLOCK if keeps else NO_BLOCK)
    with pytest.raises(AssertionError, match="released"):
        _ = layers[0].flat_keys
    paged.restore()
    assert all(layer.values.shape[:2] == (6, 3) for layer in layers)
    if keeps:
        assert all(bool((layer.flat_values == 3).all()) for layer in layers)


@given(
    kept=st.sets(st.integers(0, 4)),
    chunk_bytes=st.integers(1, 500),
    max_pinned_bytes=st.integers(0, 500),
    num_trips=st.integers(1, 3),
)
def test_kept_blocks_of_every_layer_come_back_from_host_memory(
    kept: set[int], chunk_bytes: int, max_pinned_bytes: int, num_trips: int
) -> None:
    """As where the memory is a device's: keys and values of unlike layers, from any set of blocks."""
    host = HostBlocks(is_pinned=False, chunk_bytes=chunk_bytes, max_pinned_bytes=max_pinned_bytes)
    paged = cache(host)
    blocks = sorted(kept)
    for layer in paged.layers:
        layer.keys.normal_()
        layer.values.normal_()
    expected = [(layer.keys[blocks].clone(), layer.values[blocks].clone()) for layer in paged.layers]
    for _ in range(num_trips):
        paged.release(np.array(blocks, dtype=np.int32))
        paged.restore()
        for layer, (keys, values) in zip(paged.layers, expected, strict=True):
            assert layer.keys[blocks].equal(keys)
            assert layer.values[blocks].equal(values)
    paged.close()
    assert host.num_bytes == 0


def test_contents_kept_before_are_let_go_when_the_cache_is_closed() -> None:
    """Shutdown while suspended must give the host memory back too."""
    paged = cache()
    kept = weakref.ref(paged.layers[0].keys)
    paged.release(EVERY_BLOCK)
    assert kept() is not None, "on a CPU they stay where they are"
    paged.release(NO_BLOCK)
    assert kept() is None
    host = HostBlocks(is_pinned=False)
    paged = cache(host)
    paged.release(EVERY_BLOCK)
    assert host.num_bytes > 0
    paged.close()
    assert host.num_bytes == 0


def test_a_block_that_is_none_of_the_caches_is_not_kept() -> None:
    """A scratch block is nobody's, and an index beyond the memory would end the device's context."""
    for block in (-1, 5):
        with pytest.raises(AssertionError, match=f"blocks {block} to {block} are to be kept, of 5"):
            cache().release(np.array([block], dtype=np.int32))
