"""The CPU kernels in plain torch against the definitions, written out number by number."""

import math

import pytest
import torch

from megallm.core_async.device.cpu_reference import TorchKernels
from tests.device.paged_batches import PagedBatch

KERNELS = TorchKernels()


@pytest.mark.parametrize("window", [None, 0, 3])
def test_attention_is_the_softmax_over_what_a_query_sees(window: int | None) -> None:
    """The compiled kernels are held to these, so these are held to the formula."""
    batch = PagedBatch([(1, 6), (3, 5), (4, 4)], heads=4, kv_heads=2, block_size=4, window=window)
    out = batch.attend(KERNELS)
    starts = batch.query_starts.tolist()
    for row, context in enumerate(batch.context_lengths.tolist()):
        for token in range(starts[row], starts[row + 1]):
            position = context - starts[row + 1] + token
            seen = range(0 if window is None else max(0, position - window), position + 1)
            places = [(int(batch.block_tables[row, at // 4]), at % 4) for at in seen]
            for head in range(4):
                query = batch.queries[token, head]
                scores = [0.3 * float(query @ batch.keys[block, at, head // 2]) for block, at in places]
                weights = [math.exp(score - max(scores)) for score in scores]
                expected = sum(
                    weight / sum(weights) * batch.values[block, at, head // 2]
                    for weight, (block, at) in zip(weights, places, strict=True)
                )
                assert isinstance(expected, torch.Tensor)
                torch.testing.assert_close(out[token, head], expected, rtol=0, atol=1e-5)


def test_rotary_positions_turn_pairs_of_halves_as_complex_numbers() -> None:
    """Dimension d of the part that turns is the real part, d + rotary_dim / 2 the imaginary one."""
    q, k, v = torch.randn(2, 3, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 5)
    angles = torch.randn(2, 3)
    keys, values = torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 5)
    before = torch.complex(q[..., :3], q[..., 3:6])
    rest = q[..., 6:].clone()
    both = angles.repeat(1, 2)
    KERNELS.rope_and_cache_write(q, k, v, both.cos(), both.sin(), torch.tensor([3, 0]), keys, values)
    turned = before * torch.polar(torch.ones(2, 1, 3), angles[:, None])
    torch.testing.assert_close(torch.complex(q[..., :3], q[..., 3:6]), turned)
    assert torch.equal(q[..., 6:], rest)
    assert torch.equal(keys.flatten(0, 1)[[3, 0]], k)
    assert torch.equal(values.flatten(0, 1)[[3, 0]], v)


def test_norms_and_gate_follow_their_formulas() -> None:
    """And the residual holds the sum afterwards."""
    x, residual, weight = torch.randn(4, 10), torch.randn(4, 10), torch.randn(10)
    total = x + residual

    def normed(rows: torch.Tensor) -> torch.Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight

    torch.testing.assert_close(KERNELS.rms_norm(x, weight, 0.1), normed(x))
    torch.testing.assert_close(KERNELS.add_rms_norm(x, residual, weight, 0.1), normed(total))
    assert torch.equal(residual, total)
    gate, up = x[:, :5], x[:, 5:]
    torch.testing.assert_close(KERNELS.silu_mul(x), gate / (1 + (-gate).exp()) * up)
    torch.testing.assert_close(KERNELS.linear(x, residual, x[:, 0]), x @ residual.t() + x[:, 0])
