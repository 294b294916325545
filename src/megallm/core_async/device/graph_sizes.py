"""Which sizes of steps are captured as CUDA graphs.

Few, since each takes time and memory; close together, since a step is padded to the next. Pure: knows the
engine's limits and the size of a layer, and no graph.
"""

from collections.abc import Sequence

from megallm.core_async.config import EngineConfig

FIRST_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
ROW_STEP = 32
"""From the last of the first sizes on."""
TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Sizes of mixed steps; larger ones take the device longer than the host, unless the layers are small."""
_TOKEN_STEP = 1024
"""From there on: padding is device time, and at most a sixth of a step's."""
_FEW_TOKENS = (6144, 8192, 12288, 16384)
"""The same where a bound on the number of graphs leaves no room for these."""
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


def token_sizes(config: EngineConfig, layer_weights: int) -> list[int]:
    """Gives the numbers of tokens of mixed steps that are captured, rising.

    `layer_weights` are those that a token meets in a layer: by default the sizes go on from the last of
    `TOKENS` to where a layer takes the device a millisecond, if that is further and no bound is in the way.
    """
    counts = [count for count in (config.num_graphs, config.num_mixed_graphs) if count is not None]
    bound = min(counts, default=None)
    if bound == 0:
        return []
    if config.max_graph_tokens is None:
        most = min(_most_tokens(layer_weights), config.max_tokens)
        sizes = _closest(most)
        if most > TOKENS[-1] and (bound is None or len(sizes) <= bound):
            return sizes
        sizes = [size for size in TOKENS if size <= most]
    else:
        most = min(max(config.max_graph_tokens, config.max_requests), config.max_tokens)
        sizes = _closest(most)
        if bound is not None and len(sizes) > bound:
            sizes = _up_to(most, (*TOKENS, *_FEW_TOKENS))
    if bound is None or len(sizes) <= bound:
        return sizes
    if len(sizes) < 2 * bound and not config.spaces_graphs_evenly:
        return sizes[-bound:]  # a few of the smallest are missed least
    return _spaced(sizes[-1], bound, is_even=config.spaces_graphs_evenly)


def _most_tokens(layer_weights: int) -> int:
    """Gives up to which size a captured step pays, whatever the engine's limits."""
    tokens = int(_LAYER_FLOP / (2 * max(layer_weights, 1)))
    return max(tokens // _TOKEN_STEP * _TOKEN_STEP, TOKENS[-1])


def _closest(most: int) -> list[int]:
    """Gives all sizes up to `most`, which is the last."""
    last = TOKENS[-1]
    # one more where a whole step would be a fifth
    return _up_to(most, (*TOKENS, last + _TOKEN_STEP // 2, *range(last + _TOKEN_STEP, most, _TOKEN_STEP)))


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    return [*(size for size in sizes if size < most), most]


def _spaced(most: int, count: int, *, is_even: bool) -> list[int]:
    """Gives at most `count` sizes up to `most`: at even distances, or each half of the next."""
    if is_even:
        step = -(-most // (count * _EVEN)) * _EVEN
        return [*range(step, most, step), most]
    sizes = {most}
    while len(sizes) < count and min(sizes) > 1:
        sizes.add(-(-min(sizes) // 2))
    return sorted(sizes)
