"""Which products of how many rows our tiled kernel takes, and how: a table of measurements as rules.

Measured on an H200 (132 multiprocessors) between the kernels that come before and after, in CUDA graphs,
for layers of 1,024 to 14,336 inputs and 1,024 to 28,672 outputs. Own products of up to 256 rows gain what
goes with them, a gate or a sum of parts, and the launch that hides behind the kernel ahead; cuBLAS stays
where its tiles fill the card better. Pure: knows numbers of rows, outputs and inputs.
"""

from msgspec import Struct

PROCESSORS = 132
FILLED = 0.9
"""Share of the card's places from which on a product's tiles fill it."""
FILLED_BY_THREE = 0.7
"""The same for three tiles below each other: there cuBLAS, whose tiles have other heights, is slower."""
MIN_ROWS = 2
"""A single row streams past the weights at the memory's speed; in a tile it took a fifth longer."""
MAX_SPLIT_ROWS = 256
"""Rows up to which parts of a product are summed by the norm after it: beyond, they are too many bytes."""
MIN_LARGE_ROWS = 1024
"""Rows from which on a gated product is worth tiles of 128 rows, one after the other."""
MIN_LONG_INPUTS = 8192
"""Inputs from which on a product of 193 to 256 rows is worth halving."""
_MIN_INPUTS = 512
"""Inputs of a part at least: enough for all stages of the copies."""
_SPLIT_ONE_HIGH = ((32, 2), (64, 2), (128, 2), (32, 4), (64, 4))
_SPLIT = ((64, 2), (128, 2), (64, 4), (32, 2), (32, 4))
"""Outputs of a tile and its parts, the better first: every narrow tile reads the rows again."""


class Tiles(Struct, frozen=True):
    """How a product is cut into programs, and how these are compiled."""

    rows: int
    outputs: int
    """Of one tile; a gated product's has as many of its second half."""
    depth: int
    """Inputs that a program takes at a time."""
    num_warps: int
    num_stages: int
    parts: int = 1
    """Programs that share a tile, each with a part of the inputs."""
    max_programs: int | None = None
    """Programs that take tile after tile; None is one for each."""
    group: int = 8
    """Tiles below each other that run beside each other, so that weights are read once for all."""

    def height(self, num_rows: int) -> int:
        """Gives the number of tiles below each other."""
        return -(-num_rows // self.rows)

    def num_tiles(self, num_rows: int, num_outputs: int) -> int:
        """Gives the number of tiles."""
        return self.height(num_rows) * -(-num_outputs // self.outputs)


_LARGE = Tiles(rows=128, outputs=128, depth=64, num_warps=8, num_stages=4, max_programs=PROCESSORS)
"""Of gated products of many rows, or of as many outputs as fill the card with them."""


def whole(num_rows: int, outputs: int, depth: int) -> Tiles | None:
    """Gives the tiles of a product with nothing to go with it; None where cuBLAS is faster."""
    if not MIN_ROWS <= num_rows <= MAX_SPLIT_ROWS or depth < _MIN_INPUTS:
        return None
    for width in (32, 64, 128):
        tiles = Tiles(rows=64, outputs=width, depth=128, num_warps=4, num_stages=4)
        filled = FILLED_BY_THREE if tiles.height(num_rows) == 3 else FILLED  # noqa: PLR2004 - as it says
        if filled * PROCESSORS <= tiles.num_tiles(num_rows, outputs) <= PROCESSORS:
            return tiles
    return None


def split(num_rows: int, outputs: int, depth: int) -> Tiles | None:
    """Gives the tiles of a product whose parts the norm after it sums; None where cuBLAS is faster."""
    if not MIN_ROWS <= num_rows <= MAX_SPLIT_ROWS:
        return None
    halves = Tiles(rows=128, outputs=128, depth=64, num_warps=8, num_stages=6, parts=2)
    found = [halves] if num_rows > MAX_SPLIT_ROWS * 3 // 4 and depth >= MIN_LONG_INPUTS else []
    found += [
        Tiles(rows=64, outputs=width, depth=128, num_warps=4, num_stages=4, parts=parts)
        for width, parts in (_SPLIT_ONE_HIGH if num_rows <= 64 else _SPLIT)  # noqa: PLR2004 - a tile's rows
        if depth >= parts * _MIN_INPUTS
    ]

    def num_programs(tiles: Tiles) -> int:
        return tiles.num_tiles(num_rows, outputs) * tiles.parts

    # the fullest card; of equals the one that comes first
    fitting = [tiles for tiles in found if num_programs(tiles) <= PROCESSORS]
    return max(fitting, key=num_programs, default=None)


def gated(num_rows: int, outputs: int, depth: int) -> Tiles | None:
    """Gives the tiles of a product and its gate, of so many outputs; None where cuBLAS is faster."""
    if num_rows < MIN_ROWS or depth < _MIN_INPUTS:
        return None
    if num_rows <= MAX_SPLIT_ROWS:
        for tiles, places in _gated_in_one_go(num_rows):
            if tiles.num_tiles(num_rows, outputs) <= places * PROCESSORS:
                return tiles
        is_full = _LARGE.height(num_rows) * _LARGE.rows * FILLED < num_rows
        return _LARGE if is_full and num_rows > MAX_SPLIT_ROWS // 2 else None
    turns = _LARGE.num_tiles(num_rows, outputs) / PROCESSORS
    return _LARGE if num_rows >= MIN_LARGE_ROWS and turns / -(-turns // 1) >= FILLED else None


def _gated_in_one_go(num_rows: int) -> list[tuple[Tiles, int]]:
    """Gives tiles for few rows, and how many of their programs a multiprocessor may get."""
    narrow = Tiles(rows=64, outputs=32, depth=128, num_warps=4, num_stages=4)
    medium = Tiles(rows=64, outputs=64, depth=128, num_warps=4, num_stages=4)
    if num_rows <= medium.rows:
        return [(narrow, 1), (medium, 2)]  # the second half of the programs follows the first
    if num_rows <= MAX_SPLIT_ROWS // 2:
        tall = Tiles(rows=128, outputs=64, depth=64, num_warps=8, num_stages=3)
        return [(medium, 1), (tall, 1), (_LARGE, 1), (tall, 2)]
    return [(Tiles(rows=64, outputs=64, depth=64, num_warps=4, num_stages=4), 2)]
