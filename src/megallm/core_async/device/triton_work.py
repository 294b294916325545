"""Which piece of a step each program of the attention kernels takes: made on the device, once a step.

Rows are of any lengths, and a captured launch has a fixed number of programs. So decode rows are cut into
parts of one size, that of the step, and the parts are listed: whole ones first, then the rows' last ones by
size, so that the shortest fill the gaps as programs run out of work (Graham, "Bounds on Multiprocessing
Timing Anomalies", 1969). Rows with several queries are cut into tiles of queries.

Kernels in Triton. Knows columns; knows no layer and no step. Import it only where it runs: Triton comes
with torch's CUDA builds alone.
"""
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
# (what a kernel's parameters are is Triton's own matter)

import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from megallm.core_async.device.triton_compile import launch
from megallm.core_async.device.triton_launch import chained, follow

FIELDS = 8
"""Numbers of one part or tile."""
KEYS = 64
"""Parts are of a multiple of so many keys, and begin at one."""
SOME_ROWS = 256
"""Rows that a program looks at together, a power of two: most steps have no more."""


class RowParts(Struct, frozen=True, eq=False):
    """The parts that decode rows' keys are cut into."""

    parts: Tensor
    """`[most parts, FIELDS]`, int32: place in the block tables, row, first key, key after the last, parts
    of the row, first key that the row sees, keys of the row."""
    num_parts: Tensor
    """`[1]`, int32."""
    rows: Tensor
    """`[rows, 4]`, int32: parts of the row, its first part's place in the list, its last part's."""
    is_cut: bool
    """Some row may have several parts."""


class QueryTiles(Struct, frozen=True, eq=False):
    """The tiles that chunks' queries are cut into."""

    tiles: Tensor
    """`[tiles, FIELDS]`, int32: place in the block tables, first token, queries, the first one's position,
    tokens of the row; no queries where the tile is not needed."""
    queries: int
    """Queries of one tile at most."""


def row_parts(
    kv_lengths: Tensor,
    table_rows: Tensor,
    *,
    window: int | None,
    max_cuts: int,
    min_keys: int,
    some_rows: int = SOME_ROWS,
) -> RowParts:
    """Cuts rows into parts of equal size, at least `min_keys`: at most `max_cuts` more parts than rows."""
    num_rows = len(kv_lengths)
    parts = kv_lengths.new_empty(num_rows + max_cuts, FIELDS)
    num_parts, rows = kv_lengths.new_empty(1), kv_lengths.new_empty(num_rows, 4)
    launch(
        _cut_rows,
        (num_rows,),
        kv_lengths,
        table_rows,
        parts,
        num_parts,
        rows,
        num_rows,
        max_cuts,
        min_keys,
        WINDOW=-1 if window is None else window,
        KEYS=KEYS,
        SOME_ROWS=some_rows,
        num_warps=1,  # sums over rows stay within a warp: each is one instruction
        **chained(kv_lengths),
    )
    return RowParts(parts=parts, num_parts=num_parts, rows=rows, is_cut=max_cuts > 0)


def query_tiles(
    query_starts: Tensor, kv_lengths: Tensor, table_rows: Tensor, *, num_queries: int, queries: int
) -> QueryTiles:
    """Cuts rows of at most `num_queries` queries in all, one after the other, into tiles of `queries`.

    `query_starts` is `[rows + 1]`. A row's last query is its last key's; one of length 0 has no tiles.
    """
    num_rows = len(kv_lengths)
    # row r's tiles begin at tile `queries before it // queries of a tile + r`: a few tiles stay empty
    tiles = kv_lengths.new_empty(num_queries // queries + num_rows, FIELDS)
    launch(
        _place_tiles,
        (len(tiles),),
        query_starts,
        kv_lengths,
        table_rows,
        tiles,
        num_rows,
        QUERIES=queries,
        num_warps=1,
        **chained(tiles),
    )
    return QueryTiles(tiles=tiles, queries=queries)


@triton.jit
def _list_parts(parts, places, mask, table_row, row, begin, end, count, first_seen, length):
    at = parts + places * 8
    tl.store(at, table_row, mask=mask)
    tl.store(at + 1, row, mask=mask)
    tl.store(at + 2, begin, mask=mask)
    tl.store(at + 3, end, mask=mask)
    tl.store(at + 4, count, mask=mask)
    tl.store(at + 5, first_seen, mask=mask)
    tl.store(at + 6, length, mask=mask)


@triton.jit
def _spans(lengths, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Gives the first key that rows see, and how many there are from the multiple of KEYS before it."""
    first_seen = lengths * 0
    if WINDOW >= 0:
        first_seen = tl.maximum(lengths - 1 - WINDOW, 0)
    return first_seen, lengths - first_seen // KEYS * KEYS


# (a step's columns lie one after the other, of any length)
@triton.jit(
    do_not_specialize=["num_rows", "max_cuts", "min_keys"],
    do_not_specialize_on_alignment=["kv_lengths", "table_rows"],
)
def _cut_rows(
    kv_lengths, table_rows, parts, num_parts, row_parts, num_rows, max_cuts, min_keys, WINDOW: tl.constexpr,
    KEYS: tl.constexpr, SOME_ROWS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Lists the parts of one row: where they come in the list, it works out from all rows by itself."""
    follow(CHAINED)
    row = tl.program_id(0)
    length, table_row = tl.load(kv_lengths + row), tl.load(table_rows + row)
    first_seen, span = _spans(length, KEYS, WINDOW)
    longest = 0
    total = 0
    for first in range(0, num_rows, SOME_ROWS):
        some = first + tl.arange(0, SOME_ROWS)
        _, spans = _spans(tl.load(kv_lengths + some, mask=some < num_rows, other=0), KEYS, WINDOW)
        longest = tl.maximum(longest, tl.max(spans, 0))
        total += tl.sum(spans, 0)
    size = longest
    if max_cuts > 0:
        size = tl.cdiv(tl.cdiv(total, max_cuts), KEYS) * KEYS
    size = tl.maximum(size, min_keys)
    whole = span // size
    rest = span - whole * size
    whole_at = 0
    rest_at = 0
    num_listed = 0
    for first in range(0, num_rows, SOME_ROWS):
        some = first + tl.arange(0, SOME_ROWS)
        _, spans = _spans(tl.load(kv_lengths + some, mask=some < num_rows, other=0), KEYS, WINDOW)
        wholes = spans // size
        rests = spans - wholes * size
        is_before = some < row
        whole_at += tl.sum(tl.where(is_before, wholes, 0), 0)
        # after all whole parts, those of other rows that are longer, and equal ones of rows before
        rest_at += tl.sum(wholes + (rests + is_before.to(tl.int32) > rest).to(tl.int32), 0)
        num_listed += tl.sum(wholes + (rests > 0).to(tl.int32), 0)
    if row == 0:
        tl.store(num_parts, num_listed)
    count = whole + (rest > 0).to(tl.int32)
    at_row = row_parts + row * 4
    tl.store(at_row, count)
    tl.store(at_row + 1, tl.where(whole > 0, whole_at, rest_at))
    tl.store(at_row + 2, tl.where(rest > 0, rest_at, whole_at + whole - 1))
    for first in range(0, count, 32):
        part = first + tl.arange(0, 32)
        places = tl.where(part < whole, whole_at + part, rest_at)
        begin = length - span + part * size
        end = tl.minimum(begin + size, length)
        _list_parts(parts, places, part < count, table_row, row, begin, end, count, first_seen, length)


@triton.jit(do_not_specialize=["num_rows"])
def _place_tiles(
    query_starts, kv_lengths, table_rows, tiles, num_rows, QUERIES: tl.constexpr, CHAINED: tl.constexpr
):
    follow(CHAINED)
    tile = tl.program_id(0)
    origin = tl.load(query_starts)
    row = -1
    for first in range(0, num_rows, 128):
        some = first + tl.arange(0, 128)
        starts = tl.load(query_starts + some, mask=some < num_rows, other=0) - origin
        row += tl.sum(((starts // QUERIES + some <= tile) & (some < num_rows)).to(tl.int32), 0)
    start = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - start
    length = tl.load(kv_lengths + row)
    first_query = (tile - (start - origin) // QUERIES - row) * QUERIES
    count = tl.minimum(tl.maximum(num_queries - first_query, 0), QUERIES)
    at = tiles + tile * 8
    tl.store(at, tl.load(table_rows + row))
    tl.store(at + 1, start + first_query)
    tl.store(at + 2, tl.where(length > 0, count, 0))
    tl.store(at + 3, length - num_queries + first_query)
    tl.store(at + 4, length)
