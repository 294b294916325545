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
MIN_ROWS = 2
"""A single row streams past the weights at the memory's speed; in a tile it took a fifth longer."""
MAX_SPLIT_ROWS = 256
"""Rows up to which parts of a product are summed by the norm after it: beyond, they are too many bytes."""
MIN_LARGE_ROWS = 1024
"""Rows from which on a gated product is worth tiles of 128 rows, one after the other."""
_MIN_INPUTS = 512
"""Inputs of a part at least: enough for all stages of the copies."""


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

    def num_tiles(self, num_rows: int, num_outputs: int) -> int:
        """Gives the number of tiles."""
        return -(-num_rows // self.rows) * -(-num_outputs // self.outputs)


def whole(num_rows: int, outputs: int, depth: int) -> Tiles | None:
    """Gives the tiles of a product with nothing to go with it; None where cuBLAS is faster."""
    if not MIN_ROWS <= num_rows <= MAX_SPLIT_ROWS or depth < _MIN_INPUTS:
        return None
    for width in (32, 64, 128):
        tiles = Tiles(rows=64, outputs=width, depth=128, num_warps=4, num_stages=4)
        if FILLED * PROCESSORS <= tiles.num_tiles(num_rows, outputs) <= PROCESSORS:
            return tiles
    return None


def split(num_rows: int, outputs: int, depth: int) -> Tiles | None:
    """Gives the tiles of a product whose parts the norm after it sums; None where cuBLAS is faster."""
    if not MIN_ROWS <= num_rows <= MAX_SPLIT_ROWS:
        return None
    found: list[Tiles] = []
    for width, parts in ((32, 2), (64, 2), (128, 2), (32, 4), (64, 4)):
        tiles = Tiles(rows=64, outputs=width, depth=128, num_warps=4, num_stages=4, parts=parts)
        if tiles.num_tiles(num_rows, outputs) * parts <= PROCESSORS and depth >= parts * _MIN_INPUTS:
            found.append(tiles)
    # the fullest card; of equals the fewest parts, which come first
    return max(found, key=lambda tiles: tiles.num_tiles(num_rows, outputs) * tiles.parts, default=None)


def gated(num_rows: int, outputs: int, depth: int) -> Tiles | None:
    """Gives the tiles of a product and its gate, of so many outputs; None where cuBLAS is faster."""
    if num_rows < MIN_ROWS or depth < _MIN_INPUTS:
        return None
    large = Tiles(rows=128, outputs=128, depth=64, num_warps=8, num_stages=4, max_programs=PROCESSORS)
    if num_rows <= MAX_SPLIT_ROWS:
        for tiles, places in _gated_in_one_go(num_rows):
            if tiles.num_tiles(num_rows, outputs) <= places * PROCESSORS:
                return tiles
        return large if num_rows > MAX_SPLIT_ROWS // 2 else None
    turns = large.num_tiles(num_rows, outputs) / PROCESSORS
    return large if num_rows >= MIN_LARGE_ROWS and turns / -(-turns // 1) >= FILLED else None


def _gated_in_one_go(num_rows: int) -> list[tuple[Tiles, int]]:
    """Gives tiles for few rows, and how many of their programs a multiprocessor may get."""
    narrow = Tiles(rows=64, outputs=32, depth=128, num_warps=4, num_stages=4)
    medium = Tiles(rows=64, outputs=64, depth=128, num_warps=4, num_stages=4)
    if num_rows <= medium.rows:
        return [(narrow, 1), (medium, 2)]  # the second half of the programs follows the first
    if num_rows <= MAX_SPLIT_ROWS // 2:
        tall = Tiles(rows=128, outputs=64, depth=64, num_warps=8, num_stages=3)
        return [(medium, 1), (tall, 2)]
    return [(Tiles(rows=64, outputs=64, depth=64, num_warps=4, num_stages=4), 2)]
