"""Which products are ours, by their sizes."""

import pytest

from megallm.core_async.device.tile_choice import MAX_SPLIT_ROWS, PROCESSORS, Tiles, gated, split, whole

SIZES = [1024, 2048, 3072, 4096, 6144, 14336, 28672, 151_936]
ROWS = [33, 48, 64, 96, 128, 160, 256, 512, 1024, 2048, 4096, 16384]
SHARED_BYTES = 227 * 1024
"""Of a multiprocessor, for all of its programs."""


def shared_bytes(tiles: Tiles, *, is_gated: bool) -> int:
    """Gives what the copies on their way take."""
    lines = tiles.rows + tiles.outputs * (2 if is_gated else 1)
    return lines * tiles.depth * 2 * tiles.num_stages


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("outputs", SIZES)
@pytest.mark.parametrize("depth", SIZES)
def test_tiles_fit_the_card(num_rows: int, outputs: int, depth: int) -> None:
    """One that does not fit fails at its launch; one that leaves the card idle is slower than cuBLAS."""
    for choose, is_gated in ((whole, False), (split, False), (gated, True)):
        tiles = choose(num_rows, outputs, depth)
        if tiles is None:
            continue
        assert shared_bytes(tiles, is_gated=is_gated) <= SHARED_BYTES
        # accumulators of 32 bits, at most 128 of a thread's registers
        assert tiles.rows * tiles.outputs * (2 if is_gated else 1) <= 128 * 32 * tiles.num_warps
        assert depth // tiles.parts >= tiles.depth * tiles.num_stages
        if choose is not gated:
            assert tiles.num_tiles(num_rows, outputs) * tiles.parts <= PROCESSORS


@pytest.mark.parametrize(
    ("num_rows", "outputs", "depth", "count", "parts"),
    [(64, 4096, 4096, 64, 2), (128, 4096, 14336, 64, 2), (256, 1024, 3072, 64, 2), (64, 1024, 2048, 32, 4)],
)
def test_split_products_fill_the_card_with_the_fewest_parts(
    num_rows: int, outputs: int, depth: int, count: int, parts: int
) -> None:
    """Every part more is written and read again, in 32 bits."""
    tiles = split(num_rows, outputs, depth)
    assert tiles is not None
    assert (tiles.num_tiles(num_rows, outputs), tiles.parts) == (count, parts)


def test_the_fullest_of_equally_full_cards_reads_its_rows_least() -> None:
    """Measured: two tiles below each other are better wide and in more parts, one is not."""
    assert split(128, 1024, 3072) == Tiles(rows=64, outputs=64, depth=128, num_warps=4, num_stages=4, parts=4)
    one_high = split(64, 1024, 3072)
    assert one_high is not None
    assert (one_high.outputs, one_high.parts) == (32, 4)
    halves = split(256, 4096, 14336)
    assert halves is not None
    assert (halves.rows, halves.outputs, halves.parts) == (128, 128, 2)
    assert split(192, 4096, 14336) is None


@pytest.mark.parametrize(
    ("num_rows", "is_own"), [(80, True), (128, True), (160, False), (224, False), (256, True)]
)
def test_large_gates_are_own_where_their_rows_fill_the_tiles(num_rows: int, *, is_own: bool) -> None:
    """96 rows in one turn of tiles; 160 would take the two turns of 256, and cuBLAS takes less."""
    tiles = gated(num_rows, 14336, 4096)
    assert (tiles is not None) == is_own
    assert tiles is None or (tiles.rows, tiles.outputs) == (128, 128)


def test_three_tiles_below_each_other_may_leave_more_of_the_card_idle() -> None:
    """There cuBLAS has the worse fit."""
    assert whole(160, 4096, 1024) == whole(192, 4096, 4096)
    assert whole(128, 6144, 4096) is None


@pytest.mark.parametrize("choose", [whole, split, gated])
def test_small_inputs_are_left_to_the_library(choose: object) -> None:
    """A part must be long enough for the copies to run ahead."""
    assert callable(choose)
    assert choose(64, 4096, 256) is None


def test_many_rows_are_tiled_only_with_a_gate_and_where_the_last_turn_is_full() -> None:
    """A last turn of a few tiles leaves the card idle while they run."""
    assert whole(MAX_SPLIT_ROWS + 1, 4096, 4096) is None
    assert split(MAX_SPLIT_ROWS + 1, 4096, 4096) is None
    assert gated(512, 14336, 4096) is None
    large = gated(4096, 14336, 4096)
    assert large is not None
    assert large.max_programs == PROCESSORS
    assert gated(1024, 3072, 1024) is None  # 192 tiles: one turn and a half
    assert gated(2048, 3072, 1024) == large


@pytest.mark.parametrize("choose", [whole, split, gated])
def test_a_single_row_is_never_tiled(choose: object) -> None:
    """It streams past the weights instead: a tile for it took a fifth longer."""
    assert callable(choose)
    assert choose(1, 4096, 4096) is None
    assert choose(0, 4096, 4096) is None
