"""Parts of decode rows' keys joined, in Triton's interpreter."""

import math

import pytest
import torch

from megallm.core_async.device.attention import LayerShape, PagedLayer
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.triton_join import JOINED, join
from megallm.core_async.device.triton_work import RowParts

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes the lanes, too, whose result a mask leaves out
    "ignore:invalid value encountered in:RuntimeWarning"
)

COUNTS = [2, 1, 0, JOINED + 3]
"""Parts of each row: what one part or none has made is not touched."""


@pytest.mark.parametrize("has_sinks", [True, False])
def test_parts_are_weighed_by_their_sums(has_sinks: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """More parts than are joined at a time, and the last of each row somewhere else in the list."""
    torch.manual_seed(0)
    places = [list(range(count)) for count in COUNTS]
    used = 0
    for row, count in enumerate(COUNTS):
        places[row] = list(range(used, used + max(count - 1, 0)))
        used += len(places[row])
    for row, count in enumerate(COUNTS):
        places[row] += [used] * (count > 0)
        used += count > 0
    sums, sizes = torch.randn(used, 2, 6), torch.randn(used, 2) * 3
    sizes[places[3][5]] = -1.0e30  # a part of which the row sees nothing
    sinks = torch.randn(2) if has_sinks else None
    expected = torch.full((len(COUNTS), 2, 6), 7.0)
    for row, count in enumerate(COUNTS):
        if count > 1:
            own = sizes[places[row]].double() * math.log(2)
            logits = own if sinks is None else torch.cat((own, sinks.double()[None]))
            weights = logits.softmax(0)[:count]
            expected[row] = (weights[..., None] * sums[places[row]]).sum(0)
    rows = torch.tensor([[len(of), *(of[:1] or [0]), *(of[-1:] or [0]), 0] for of in places]).int()
    parts = RowParts(parts=rows, num_parts=torch.tensor([used]).int(), rows=rows, is_cut=True)
    out = torch.full_like(expected, 7.0)
    layer = PagedLayer(LayerShape(2, 1, 8, 6, 1.0, has_sinks=has_sinks), LayerCache(), sinks)
    join(layer, parts, sums.flatten(0, 1), sizes.flatten(), out)
    torch.testing.assert_close(out, expected)
