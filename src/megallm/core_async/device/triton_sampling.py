"""Both ends of a decode step without the host: the rows' inputs, and each row's best token.

Kernels in Triton. Knows rows, tables and logits; knows no model. Import it only where it runs: Triton
comes with torch's CUDA builds alone.
"""
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
# (what a kernel's parameters are is Triton's own matter)

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from megallm.core_async.device.triton_compile import launch, launch_always
from megallm.core_async.device.triton_launch import chained, follow

CHUNK = 4096
"""Logits that one program looks at."""
ROWS = 128
"""Tokens whose inputs one program prepares."""
NUMBERS = 1024
"""Numbers that one program fetches."""
TURNS = 4
"""Buffers on the host for each way: more than there are plans in flight, so that what a step told stays
until it is read."""


class TokenTensors(Struct, frozen=True, eq=False):
    """What a step's tokens are and where they go, on the device."""

    token_ids: Tensor
    """`[tokens]`, int64."""
    slots: Tensor
    """`[tokens]`, int64."""
    kv_lengths: Tensor
    """`[tokens]`, int32: how many tokens of its row each one sees, itself included."""


def fetch(sent: Tensor, turns: Tensor, columns: Tensor) -> None:
    """Fetches a step's columns from the host: those in the place of the device's turn, int32.

    `sent` is `[TURNS, at least columns]`, pinned; `turns` is `[2]`, int32: the turn, and where it is put for
    the kernels after this one.
    """
    launch(
        _fetch,
        (triton.cdiv(len(columns), NUMBERS),),
        sent,
        turns,
        columns,
        len(columns),
        sent.stride(0),
        NUMBERS=NUMBERS,
        num_warps=4,
        **chained(columns),
    )


def look_up(
    rows: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    block_tables: Tensor,
    *,
    block_size: int,
    known: Tensor | None = None,
) -> TokenTensors:
    """Looks up each token's id, and the slot of its position; all columns are int32, `[tokens]`.

    `rows` is which row each token is of. `known` are the ids, or -1 where it is the row's newest token,
    which all of them are where there is none.
    """
    count = len(rows)
    token_ids = torch.empty(count, dtype=torch.int64, device=rows.device)
    slots = torch.empty_like(token_ids)
    kv_lengths = torch.empty_like(rows)
    # within `compile_all`, too: the embedding would be read at ids that are none
    launch_always(
        _look_up,
        (triton.cdiv(count, ROWS),),
        rows,
        positions,
        last_tokens,
        block_tables,
        rows if known is None else known,
        token_ids,
        slots,
        kv_lengths,
        count,
        block_tables.stride(0),
        HAS_KNOWN=known is not None,
        BLOCK=block_size,
        ROWS=ROWS,
        num_warps=1,
        **chained(rows),
    )
    return TokenTensors(token_ids=token_ids, slots=slots, kv_lengths=kv_lengths)


def take_best(logits: Tensor, rows: Tensor, last_tokens: Tensor, turns: Tensor, told: Tensor) -> None:
    """Puts each row's best token into `last_tokens[rows]`, and into `told` in the place of this step's turn.

    Of equals the first is best; a row with NaN has no finite best, and tells the token's complement, -1 -
    token. The turn that comes next is the one after this. `logits` is `[rows, vocab]`; `turns` is as in
    `fetch`; `told` is `[TURNS, at least rows]`, int32, pinned.
    """
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    best = torch.empty((count, chunks), dtype=torch.float32, device=logits.device)
    places = torch.empty((count, chunks), dtype=torch.int32, device=logits.device)
    launch(
        _best_of_chunks,
        (chunks, count),
        logits,
        best,
        places,
        logits.stride(0),
        vocab,
        CHUNK=CHUNK,
        num_warps=4,
        **chained(logits),
    )
    launch(
        _best_of_rows,
        (count,),
        best,
        places,
        rows,
        last_tokens,
        turns,
        told,
        chunks,
        told.stride(0),
        PADDED=triton.next_power_of_2(chunks),
        TURNS=TURNS,
        num_warps=1,
        **chained(logits),
    )


@triton.jit(do_not_specialize=["count"])
def _fetch(sent, turns, columns, count, sent_row, NUMBERS: tl.constexpr, CHAINED: tl.constexpr):
    follow(CHAINED)
    turn = tl.load(turns)
    places = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    # volatile: the host wrote since a kernel last read there
    numbers = tl.load(sent + turn * sent_row + places, mask=places < count, volatile=True)
    tl.store(columns + places, numbers, mask=places < count)
    if tl.program_id(0) == 0:
        tl.store(turns + 1, turn)


# (columns lie one after the other, of any length)
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "positions", "known"])
def _look_up(
    rows, positions, last_tokens, block_tables, known, token_ids, slots, kv_lengths, count,
    table_row, HAS_KNOWN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = places < count
    row = tl.load(rows + places, mask=mask, other=0).to(tl.int64)
    position = tl.load(positions + places, mask=mask, other=0)
    block = tl.load(block_tables + row * table_row + position // BLOCK, mask=mask, other=0).to(tl.int64)
    ids = tl.load(last_tokens + row, mask=mask, other=0)
    if HAS_KNOWN:
        given = tl.load(known + places, mask=mask, other=0)
        ids = tl.where(given < 0, ids, given.to(tl.int64))
    tl.store(token_ids + places, ids, mask=mask)
    tl.store(slots + places, block * BLOCK + position % BLOCK, mask=mask)
    tl.store(kv_lengths + places, position + 1, mask=mask)


@triton.jit
def _best_of_chunks(logits, best, places, logits_row, vocab, CHUNK: tl.constexpr, CHAINED: tl.constexpr):
    follow(CHAINED)
    chunk, row = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    some = tl.load(logits + row.to(tl.int64) * logits_row + ids, mask=ids < vocab, other=-float("inf"))
    some = some.to(tl.float32)
    # NaN counts as better than anything, and its row as not finite
    some = tl.where(some == some, some, float("inf"))  # noqa: PLR0124 - NaN is not itself
    found, place = tl.max(some, 0, return_indices=True, return_indices_tie_break_left=True)
    at = row * tl.num_programs(0) + chunk
    tl.store(best + at, found)
    tl.store(places + at, chunk * CHUNK + place)


@triton.jit
def _best_of_rows(
    best, places, rows, last_tokens, turns, told, chunks, told_row, PADDED: tl.constexpr,
    TURNS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    row = tl.program_id(0)
    some = tl.arange(0, PADDED)
    bests = tl.load(best + row * chunks + some, mask=some < chunks, other=-float("inf"))
    found, chunk = tl.max(bests, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(places + row * chunks + chunk)
    tl.store(last_tokens + tl.load(rows + row).to(tl.int64), token.to(tl.int64))
    turn = tl.load(turns + 1)
    is_finite = (found > -float("inf")) & (found < float("inf"))
    tl.store(told + turn * told_row + row, tl.where(is_finite, token, -1 - token))
    if row == 0:
        tl.store(turns, (turn + 1) % TURNS)
