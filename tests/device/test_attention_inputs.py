"""What comes before attention on CUDA, in Triton's interpreter."""

import numpy as np
import torch
from torch import nn

from megallm.core_async.device.attention import AttentionBatch, HeadNorm, HeadNorms, LayerShape, PagedLayer
from megallm.core_async.device.attention_inputs import turned, unturned
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.rope import rotated

NOTHING = np.zeros(0, dtype=np.int32)
SHAPE = LayerShape(4, 2, 8, 6, 1.0, uses_rope=True)
SLOTS = torch.tensor([5, 0, 2])
ANGLES = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)).repeat(1, 2)


def cache_of_zeros() -> LayerCache:
    """Gives room for three blocks of two tokens."""
    cache = LayerCache()
    cache.place(torch.zeros(3, 2, 2, 8), torch.zeros(3, 2, 2, 6))
    return cache


def batch_of_three() -> AttentionBatch:
    """Gives three tokens at `ANGLES`, each of a row of its own."""
    return AttentionBatch(
        num_tokens=3,
        num_decode=3,
        max_query_length=1,
        max_kv_length=1,
        positions=torch.zeros(3, dtype=torch.int32),
        slots=SLOTS,
        query_starts=torch.arange(4, dtype=torch.int32),
        kv_lengths=torch.ones(3, dtype=torch.int32),
        block_tables=torch.zeros(3, 1, dtype=torch.int32),
        host_starts=NOTHING,
        host_query_starts=NOTHING,
        host_kv_lengths=NOTHING,
        host_block_tables=NOTHING,
        cosines=ANGLES.cos(),
        sines=ANGLES.sin(),
    )


def test_keys_and_values_are_written_and_queries_turned() -> None:
    """Heads may come with their kv head or packed, in any stride; each kv head's stand together."""
    torch.manual_seed(0)
    cache = cache_of_zeros()
    query, key, value = torch.randn(3, 4, 8), torch.randn(3, 2, 16)[..., ::2], torch.randn(3, 2, 6)
    expected = rotated(query, ANGLES.cos(), ANGLES.sin(), is_interleaved=False)
    expected_key = rotated(key, ANGLES.cos(), ANGLES.sin(), is_interleaved=False)
    got = turned(PagedLayer(SHAPE, cache), batch_of_three(), query.clone(), key, value)
    torch.testing.assert_close(got, expected.view(3, 2, 2, 8))
    torch.testing.assert_close(cache.flat_keys[SLOTS], expected_key)
    assert cache.flat_values[SLOTS].equal(value)


def test_heads_are_normed_where_the_layer_says_so() -> None:
    """A dense layer leaves its norms to the backend; whatever has normed already gives none."""
    torch.manual_seed(0)
    cache, norm = cache_of_zeros(), nn.RMSNorm(8, eps=1e-5).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    norms = HeadNorms(key=HeadNorm(module=norm, epsilon=1e-5))
    query, key, value = torch.randn(3, 2, 2, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 6)
    expected = rotated(query.flatten(1, 2), ANGLES.cos(), ANGLES.sin(), is_interleaved=False)
    expected_key = rotated(norm(key), ANGLES.cos(), ANGLES.sin(), is_interleaved=False)
    got = turned(PagedLayer(SHAPE, cache, norms=norms), batch_of_three(), query.clone(), key, value)
    torch.testing.assert_close(got, expected.view(3, 2, 2, 8))
    torch.testing.assert_close(cache.flat_keys[SLOTS], expected_key)


def test_what_attention_turns_itself_is_left_as_it_is() -> None:
    """Heads stand by kv head; nothing is copied but what has its last dimension strided, nothing written."""
    torch.manual_seed(0)
    cache, batch = cache_of_zeros(), batch_of_three()
    query, key, value = torch.randn(3, 4, 8), torch.randn(3, 2, 16)[..., ::2], torch.randn(3, 2, 6)
    heads, new = unturned(PagedLayer(SHAPE, cache), batch, query, key, value)
    assert heads.equal(query.view(3, 2, 2, 8))
    assert heads.data_ptr() == query.data_ptr()
    assert new.key.equal(key)
    assert new.key.stride(-1) == 1
    assert new.value is value
    assert new.cosines is batch.cosines
    assert not bool(cache.flat_keys.any())


def test_layer_without_rotary_positions_has_no_angles() -> None:
    """The step has them for other layers."""
    query, key, value = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8), torch.zeros(3, 2, 6)
    layer = PagedLayer(LayerShape(4, 2, 8, 6, 1.0), cache_of_zeros())
    _, new = unturned(layer, batch_of_three(), query, key, value)
    assert new.cosines is None
    assert new.sines is None
