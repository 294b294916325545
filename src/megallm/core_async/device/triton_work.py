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
FEW_ROWS = 128
"""Up to so many rows are cut by one and the same kernel: a row a thread, which it has anyway."""
KEYS = 64
"""Parts are of a multiple of so many keys, and begin at one."""


class RowParts(Struct, frozen=True, eq=False):
    """The parts that decode rows' keys are cut into."""

    parts: Tensor
    """`[most parts, FIELDS]`, int32: place in the block tables, row, first key, key after the last, parts
    of the row, first key that the row sees."""
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
) -> RowParts:
    """Cuts rows into parts of equal size, at least `min_keys`: at most `max_cuts` more parts than rows."""
    num_rows = len(kv_lengths)
    parts = kv_lengths.new_empty(num_rows + max_cuts, FIELDS)
    num_parts, rows = kv_lengths.new_empty(1), kv_lengths.new_empty(num_rows, 4)
    launch(
        _cut_rows,
        (1,),
        kv_lengths,
        table_rows,
        parts,
        num_parts,
        rows,
        num_rows,
        max_cuts,
        min_keys,
        ROWS=max(FEW_ROWS, triton.next_power_of_2(num_rows)),
        WINDOW=-1 if window is None else window,
        KEYS=KEYS,
        num_warps=4,
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
def _list_parts(parts, places, mask, table_row, row, begin, end, count, first_seen):
    at = parts + places * 8
    tl.store(at, table_row, mask=mask)
    tl.store(at + 1, row, mask=mask)
    tl.store(at + 2, begin, mask=mask)
    tl.store(at + 3, end, mask=mask)
    tl.store(at + 4, count, mask=mask)
    tl.store(at + 5, first_seen, mask=mask)


@triton.jit
def _spans(lengths, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Gives the first key that rows see, and how many there are from the multiple of KEYS before it."""
    first_seen = lengths * 0
    if WINDOW >= 0:
        first_seen = tl.maximum(lengths - 1 - WINDOW, 0)
    return first_seen, lengths - first_seen // KEYS * KEYS


@triton.jit(do_not_specialize=["num_rows", "max_cuts", "min_keys"])
def _cut_rows(
    kv_lengths, table_rows, parts, num_parts, row_parts, num_rows, max_cuts, min_keys, ROWS: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    lengths = tl.load(kv_lengths + rows, mask=is_row, other=0)
    table_row = tl.load(table_rows + rows, mask=is_row, other=0)
    first_seen, spans = _spans(lengths, KEYS, WINDOW)
    first = lengths - spans
    size = tl.max(spans, 0)
    if max_cuts > 0:
        size = tl.cdiv(tl.cdiv(tl.sum(spans, 0), max_cuts), KEYS) * KEYS
    size = tl.maximum(size, min_keys)
    whole = spans // size
    rest = spans - whole * size
    num_whole = tl.sum(whole, 0)
    # a row's last part comes after those of other rows that are longer, and after equal ones before it
    rank = rows * 0
    for other in range(0, num_rows, 16):
        others = other + tl.arange(0, 16)
        other_lengths = tl.load(kv_lengths + others, mask=others < num_rows, other=0)
        _, other_spans = _spans(other_lengths, KEYS, WINDOW)
        other_rest = (other_spans % size)[None, :]
        is_before = (other_rest > rest[:, None]) | (
            (other_rest == rest[:, None]) & (others[None, :] < rows[:, None])
        )
        rank += tl.sum((is_before & (others < num_rows)[None, :]).to(tl.int32), 1)
    whole_at, rest_at = tl.cumsum(whole, 0) - whole, num_whole + rank
    has_rest = rest > 0
    count = whole + has_rest.to(tl.int32)
    tl.store(num_parts, num_whole + tl.sum(has_rest.to(tl.int32), 0))
    at = row_parts + rows * 4
    tl.store(at, count, mask=is_row)
    tl.store(at + 1, tl.where(whole > 0, whole_at, rest_at), mask=is_row)
    tl.store(at + 2, tl.where(has_rest, rest_at, whole_at + whole - 1), mask=is_row)
    for part in range(tl.max(whole, 0)):
        begin = first + part * size
        _list_parts(
            parts, whole_at + part, part < whole, table_row, rows, begin, begin + size, count, first_seen
        )
    _list_parts(parts, rest_at, has_rest, table_row, rows, first + whole * size, lengths, count, first_seen)


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
