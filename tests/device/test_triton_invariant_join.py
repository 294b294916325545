"""Parts of decode rows' keys joined, in Triton's interpreter."""

import math

import pytest
import torch

from megallm.core_async.device.attention import LayerShape, PagedLayer
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.triton_invariant_join import join_parts

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:overflow encountered in exp2:RuntimeWarning"
)


@pytest.mark.parametrize("has_sinks", [True, False])
def test_parts_are_weighed_by_their_scores(has_sinks: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A row of no key is left out, and what was never written beyond a row's parts is not read."""
    torch.manual_seed(0)
    lengths, most = [4, 100, 0, 41], 13
    shape = LayerShape(2, 1, 8, 6, 1.0, has_sinks=has_sinks)
    parts = torch.full((len(lengths), 2, most, 6), math.nan)
    best = torch.full((len(lengths), 2, most, 2), math.nan)
    sinks = torch.randn(2) if has_sinks else None
    expected = torch.full((len(lengths), 2, 6), 7.0)
    for row, length in enumerate(lengths):
        count = -(-length // 8)
        parts[row, :, :count] = torch.randn(2, count, 6)
        best[row, :, :count] = torch.rand(2, count, 2) * 4 + 0.5
        if count:
            scales = torch.exp2(best[row, :, :count, 0])
            total = (scales * best[row, :, :count, 1]).sum(-1)
            if sinks is not None:
                total += sinks.exp()
            expected[row] = (parts[row, :, :count] * scales[..., None]).sum(1) / total[:, None]
    out = torch.full_like(expected, 7.0)
    join_parts(
        PagedLayer(shape, LayerCache(), sinks),
        parts.flatten(0, 2),
        best.flatten(0, 2),
        torch.tensor(lengths, dtype=torch.int32),
        part=8,
        out=out,
    )
    torch.testing.assert_close(out, expected)
