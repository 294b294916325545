"""Norms, gate, rotary positions and cache write, in Triton's interpreter."""

import pytest
import torch

from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.rope import rotated, table_of
from megallm.core_async.device.triton_layer import add_rms_norm, rms_norm, silu_gate, turn_and_write

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)


def test_norm_is_of_the_last_dimension_of_strided_rows() -> None:
    """The norm of a head takes a part of the joint projection as it lies."""
    rows, weight = torch.randn(5, 4, 3, 16)[:, :, :2], torch.rand(16)
    torch.testing.assert_close(rms_norm(rows, weight, 1e-5), torch.rms_norm(rows, (16,), weight, 1e-5))


def test_sum_and_norm_leaves_the_residual_alone() -> None:
    """The residual may be what a user's hook kept."""
    rows, residual, weight = torch.randn(3, 48), torch.randn(3, 48), torch.rand(48)
    total, normed = add_rms_norm(rows.clone(), kept := residual.clone(), weight, 1e-5)
    assert kept.equal(residual)
    torch.testing.assert_close(total, rows + residual)
    torch.testing.assert_close(normed, torch.rms_norm(rows + residual, (48,), weight, 1e-5))


def test_gate_is_silu_of_the_first_half() -> None:
    """The halves swapped would still look like numbers; rows are wider than one program."""
    rows = torch.randn(2, 2 * 1100)
    expected = torch.nn.functional.silu(rows[:, :1100]) * rows[:, 1100:]
    torch.testing.assert_close(silu_gate(rows), expected)


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_queries_turn_in_place_and_keys_on_their_way_to_the_cache(is_interleaved: bool) -> None:  # noqa: FBT001
    """Dimensions past the rotary ones pass; slots that are nobody's stay as they were."""
    mixed = torch.randn(3, 2, 5, 16)
    query, key, value = mixed[:, :, :3].clone(), mixed[:, :, 3], mixed[:, :, 4]
    angles = torch.rand(3, 4)
    both = angles.repeat_interleave(2, -1) if is_interleaved else torch.cat((angles, angles), -1)
    table = table_of(both, factor=1.0, is_interleaved=is_interleaved, dtype=torch.float32)
    cache = LayerCache()
    cache.place(torch.zeros(4, 2, 2, 16), torch.zeros(4, 2, 2, 16))
    slots = torch.tensor([7, 0, 3])
    turn_and_write(query, key, value, table.cosines, table.sines, slots, cache, is_interleaved=is_interleaved)

    def turned(vectors: torch.Tensor) -> torch.Tensor:
        return rotated(vectors, table.cosines, table.sines, is_interleaved=is_interleaved)

    torch.testing.assert_close(query.flatten(1, 2), turned(mixed[:, :, :3].flatten(1, 2)))
    torch.testing.assert_close(cache.flat_keys[slots], turned(key))
    assert cache.flat_values[slots].equal(value)
    assert int((cache.flat_keys != 0).any(-1).any(-1).sum()) == 3
