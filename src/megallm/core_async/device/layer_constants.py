"""What attention kernels are compiled for by the layer alone. Import it only where it runs, as they."""

import triton

from megallm.core_async.device.attention import PagedLayer

_MIN_WIDTH = 16
"""Of one side of a product of tiles."""


def constants_of(layer: PagedLayer) -> dict[str, int | float | bool]:
    """Gives a layer's constants by the names that the kernels have for them."""
    shape = layer.shape
    return {
        "DIM": shape.head_dim,
        "DIM_WIDTH": triton.next_power_of_2(max(_MIN_WIDTH, shape.head_dim)),
        "VALUE_DIM": shape.value_head_dim,
        "VALUE_WIDTH": triton.next_power_of_2(max(_MIN_WIDTH, shape.value_head_dim)),
        "BLOCK": layer.cache.keys.shape[1],
        "WINDOW": -1 if shape.window is None else shape.window,
        "SOFTCAP": shape.softcap or 0.0,
        "HAS_SINKS": layer.sinks is not None,
    }
