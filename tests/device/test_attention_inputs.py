"""What comes before attention on CUDA, in Triton's interpreter."""

import numpy as np
import torch

from megallm.core_async.device.attention import AttentionBatch, LayerShape, PagedLayer
from megallm.core_async.device.attention_inputs import turned
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.rope import rotated

NOTHING = np.zeros(0, dtype=np.int32)


def test_keys_and_values_are_written_and_queries_turned() -> None:
    """Heads may come with their kv head or packed, in any stride; each kv head's stand together."""
    torch.manual_seed(0)
    shape = LayerShape(4, 2, 8, 6, 1.0, uses_rope=True)
    cache = LayerCache()
    cache.place(torch.zeros(3, 2, 2, 8), torch.zeros(3, 2, 2, 6))
    angles = torch.rand(3, 4).repeat(1, 2)
    slots = torch.tensor([5, 0, 2])
    batch = AttentionBatch(
        num_tokens=3,
        num_decode=3,
        max_query_length=1,
        max_kv_length=1,
        positions=torch.zeros(3, dtype=torch.int32),
        slots=slots,
        query_starts=torch.arange(4, dtype=torch.int32),
        kv_lengths=torch.ones(3, dtype=torch.int32),
        block_tables=torch.zeros(3, 1, dtype=torch.int32),
        host_starts=NOTHING,
        host_query_starts=NOTHING,
        host_kv_lengths=NOTHING,
        host_block_tables=NOTHING,
        cosines=angles.cos(),
        sines=angles.sin(),
    )
    query, key, value = torch.randn(3, 4, 8), torch.randn(3, 2, 16)[..., ::2], torch.randn(3, 2, 6)
    expected = rotated(query, angles.cos(), angles.sin(), is_interleaved=False)
    expected_key = rotated(key, angles.cos(), angles.sin(), is_interleaved=False)
    got = turned(PagedLayer(shape, cache), batch, query.clone(), key, value)
    torch.testing.assert_close(got, expected.view(3, 2, 2, 8))
    torch.testing.assert_close(cache.flat_keys[slots], expected_key)
    assert cache.flat_values[slots].equal(value)
