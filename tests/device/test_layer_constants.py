"""A layer's constants, by the names that three kernels have for them."""

import torch

from megallm.core_async.device.attention import LayerShape, PagedLayer
from megallm.core_async.device.kv_cache import LayerCache
from megallm.core_async.device.layer_constants import constants_of


def test_what_a_layer_lacks_is_a_number_too() -> None:
    """A kernel's constants have no None; widths are powers of two, and wide enough for a product."""
    cache = LayerCache()
    cache.place(torch.zeros(3, 64, 2, 80), torch.zeros(3, 64, 2, 8))
    plain = constants_of(PagedLayer(LayerShape(4, 2, 80, 8, 0.1), cache))
    assert (plain["DIM"], plain["DIM_WIDTH"], plain["VALUE_DIM"], plain["VALUE_WIDTH"]) == (80, 128, 8, 16)
    assert (plain["BLOCK"], plain["WINDOW"], plain["SOFTCAP"], plain["HAS_SINKS"]) == (64, -1, 0.0, False)
    shape = LayerShape(4, 2, 80, 8, 0.1, window=0, softcap=30.0, has_sinks=True)
    rich = constants_of(PagedLayer(shape, cache, sinks=torch.zeros(4)))
    assert (rich["WINDOW"], rich["SOFTCAP"], rich["HAS_SINKS"]) == (0, 30.0, True)
