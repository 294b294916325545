"""Which sizes of steps are captured as CUDA graphs.

Few, since each takes time and memory; close together, since a step is padded to the next. Pure: knows the
engine's limits and the size of a layer, and no graph.
"""

from megallm.core_async.config import EngineConfig

FIRST_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
ROW_STEP = 32
"""From the last of the first sizes on."""
TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Sizes of mixed steps; larger ones take the device longer than the host, unless the layers are small."""
_TOKEN_STEP = 512
_PADDING = 6
"""From there on sizes are multiples of that, and the part of a step that is padding is at most so small."""
_LAYER_FLOP = 600e12 * 1e-3
"""What an H200 does in a millisecond; Python takes 0.65 ms to launch a layer there, more on other hosts."""
_EVEN = 8
"""Sizes at even distances are multiples of it."""


def row_sizes(config: EngineConfig) -> list[int]:
    """Gives the numbers of decode rows that are captured, rising; the last one is `max_requests`."""
    most = config.max_requests
    if config.num_graphs == 0:
        return []
    if config.num_graphs is not None:
        return _spaced(most, config.num_graphs, is_even=config.spaces_graphs_evenly)
    sizes = [*FIRST_ROWS, *range(FIRST_ROWS[-1] + ROW_STEP, most, ROW_STEP)]
    return [*(size for size in sizes if size < most), most]


def token_sizes(config: EngineConfig, layer_weights: int | None) -> list[int]:
    """Gives the numbers of tokens of mixed steps that are captured, rising.

    `layer_weights` are those that a token meets in a layer, None where they are not of 16 bits: by default
    the sizes go on from the last of `TOKENS` to where a layer takes the device a millisecond.
    """
    counts = [count for count in (config.num_graphs, config.num_mixed_graphs) if count is not None]
    bound = min(counts, default=None)
    if bound == 0:
        return []
    if config.max_graph_tokens is None:
        most = _most_tokens(layer_weights)
    else:
        most = max(config.max_graph_tokens, config.max_requests)
    most = min(most, config.max_tokens)
    sizes = _closest(most)
    if bound is None or len(sizes) <= bound:
        return sizes
    if len(sizes) < 2 * bound and not config.spaces_graphs_evenly:
        return sizes[-bound:]  # a few of the smallest are missed least
    return _spaced(sizes[-1], bound, is_even=config.spaces_graphs_evenly)


def _most_tokens(layer_weights: int | None) -> int:
    """Gives up to which size a captured step pays, whatever the engine's limits."""
    if layer_weights is None:
        return TOKENS[-1]
    tokens = int(_LAYER_FLOP / (2 * max(layer_weights, 1)))
    return max(tokens // _TOKEN_STEP * _TOKEN_STEP, TOKENS[-1])


def _closest(most: int) -> list[int]:
    """Gives all sizes up to `most`, which is the last."""
    sizes = [size for size in TOKENS if size < most]
    while (size := _after(sizes[-1] if sizes else 0)) < most:
        sizes.append(size)
    return [*sizes, most]


def _after(size: int) -> int:
    """Gives the size after one: a smaller step than its next is padded by a sixth at most."""
    if size < TOKENS[-1]:
        return TOKENS[0] if not size else TOKENS[TOKENS.index(size) + 1]
    return size * _PADDING // (_PADDING - 1) // _TOKEN_STEP * _TOKEN_STEP


def _spaced(most: int, count: int, *, is_even: bool) -> list[int]:
    """Gives at most `count` sizes up to `most`: at even distances, or each half of the next."""
    if is_even:
        step = -(-most // (count * _EVEN)) * _EVEN
        return [*range(step, most, step), most]
    sizes = {most}
    while len(sizes) < count and min(sizes) > 1:
        sizes.add(-(-min(sizes) // 2))
    return sorted(sizes)
