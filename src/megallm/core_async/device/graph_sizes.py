"""Which sizes of steps are captured as CUDA graphs.

Few, since each takes time and memory; close together, since a step is padded to the next. Pure: knows the
engine's limits, and no graph.
"""

from megallm.core_async.config import EngineConfig

FIRST_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
ROW_STEP = 32
"""From the last of the first sizes on."""
TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Sizes of mixed steps; larger ones take the device longer than the host."""
_MORE_TOKENS = (6144, 8192, 12288, 16384)
"""Further sizes, where all steps are to be captured."""
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


def token_sizes(config: EngineConfig) -> list[int]:
    """Gives the numbers of tokens of mixed steps that are captured, rising."""
    if config.num_graphs == 0 or config.num_mixed_graphs == 0:
        return []
    most = TOKENS[-1] if config.max_graph_tokens is None else config.max_graph_tokens
    if config.max_graph_tokens is not None:
        most = max(most, config.max_requests)
    most = min(most, config.max_tokens)
    counts = [count for count in (config.num_graphs, config.num_mixed_graphs) if count is not None]
    sizes = [size for size in (*TOKENS, *_MORE_TOKENS) if size <= most]
    if config.max_graph_tokens is not None and most not in sizes:
        sizes.append(most)
    if not counts or len(sizes) <= min(counts):
        return sizes
    if len(sizes) < 2 * min(counts) and not config.spaces_graphs_evenly:
        return sizes[-min(counts) :]  # a few of the smallest are missed least
    return _spaced(sizes[-1], min(counts), is_even=config.spaces_graphs_evenly)


def _spaced(most: int, count: int, *, is_even: bool) -> list[int]:
    """Gives at most `count` sizes up to `most`: at even distances, or each half of the next."""
    if is_even:
        step = -(-most // (count * _EVEN)) * _EVEN
        return [*range(step, most, step), most]
    sizes = {most}
    while len(sizes) < count and min(sizes) > 1:
        sizes.add(-(-min(sizes) // 2))
    return sorted(sizes)
