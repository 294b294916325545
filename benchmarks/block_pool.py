"""What one block costs the block pool, small or large, and what prefix caching costs a step.

`take`, `give_back`, `share`, `keep`, `touch` and `evict` are what becomes of a block: it leaves the
free ones; returns to them; is made known when it is filled; stays in the cache when nobody holds it
any more; is found there by another prompt; and is given up for a new one. Rows hold 50 blocks, and
come ten at a time.

`ns_per_block` is taken on the same thousand blocks and prompts over and over while others hold all
the rest, known as well: what grows with the size of the pool shows in it. `sweep_ns_per_block` goes
through the whole pool with new prompts in each round, so that each block comes up as the one used
longest ago: with a million of them the processor finds none of it in its caches.

The second table is a scheduler's step, the real roster and pool without the actors: a batch that
decodes, whose requests (256 to 768 tokens of prompt, 64 to 192 of output) end and are followed by
others with random prompts, so that all is hashed and nothing is found. All times are CPU time of
the thread.
"""

import argparse
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Struct

from benchmarks.measure import alternate
from benchmarks.report import Report, Table, show_progress, significant
from benchmarks.steady_batch import SteadyBatch
from megallm.core_async.messages import Admission, FilledBlocks, Ints, ReserveBlocks, Row
from megallm.core_async.plan.block_pool import BlockPool
from megallm.core_async.plan.prefix import ROOT, extend_keys

BLOCKS_OF_ROW: Final = 50
ROWS_AT_ONCE: Final = 10
FEW_BLOCKS: Final = 1000
"""Blocks that are in use while the others are held."""
OPERATIONS: Final = ("take", "give_back", "evict", "share", "keep", "touch")
PLENTY: Final = 1 << 40
"""A budget that never binds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add(
        "--sizes",
        nargs="+",
        type=int,
        default=[FEW_BLOCKS, 1_000_000],
        metavar="N",
        help=f"blocks of the pools, each at least {FEW_BLOCKS:,} (default: 1000 1000000)",
    )
    add(
        "--blocks",
        type=int,
        default=200_000,
        metavar="N",
        help="that each figure is of (default: %(default)s)",
    )
    add(
        "--block-sizes",
        nargs="+",
        type=int,
        default=[16, 256],
        metavar="N",
        help="tokens of a block, of the first table the first (default: 16 256)",
    )
    add("--batch", type=int, default=256, metavar="N", help="rows that decode (default: %(default)s)")
    add("--steps", type=int, default=2000, metavar="N", help="scheduler's steps (default: %(default)s)")
    add(
        "--step-ms",
        type=float,
        default=34.0,
        metavar="MS",
        help="what the model takes for a step (default: %(default)s, an 8B model on an H200: 12 for the rows"
        " that decode, 22 for 1,024 tokens of prompts)",
    )


def run(options: argparse.Namespace) -> Report:
    """Measures both."""
    if (smallest := min(options.sizes)) < FEW_BLOCKS:
        raise ValueError(f"sizes holds {smallest}; a pool must have at least {FEW_BLOCKS} blocks")
    size = options.block_sizes[0]
    blocks = _rows([measure_blocks(each, size, options.blocks) for each in options.sizes])
    steps = [
        measure_caching(options.batch, each, options.steps, options.step_ms) for each in options.block_sizes
    ]
    tables = [
        _table(f"Blocks of {size} tokens; ratios to the first pool", blocks),
        _table("A scheduler's step without and with prefix caching, no hits", steps),
    ]
    return Report("block_pool", tables, [*blocks, *steps])


def _table(title: str, results: list[dict[str, Any]]) -> Table:
    return Table(title, tuple(results[0]), [tuple(result.values()) for result in results])


def _rows(costs: list["Costs"]) -> list[dict[str, Any]]:  # Any: cells of a table
    """Gives one row for each operation and pool."""
    return [
        {
            "operation": operation,
            "num_blocks": cost.num_blocks,
            "ns_per_block": significant(cost.few[operation], 3),
            "ratio": significant(cost.few[operation] / costs[0].few[operation], 3),
            "sweep_ns_per_block": significant(cost.sweep[operation], 3),
            "sweep_ratio": significant(cost.sweep[operation] / costs[0].sweep[operation], 3),
        }
        for operation in OPERATIONS
        for cost in costs
    ]


# ---- a block -------------------------------------------------------------------------------------


class Costs(Struct, frozen=True):
    """Nanoseconds a block, by operation."""

    num_blocks: int
    few: dict[str, float]
    sweep: dict[str, float]


def measure_blocks(num_blocks: int, block_size: int, num_measured: int) -> Costs:
    """Measures each operation in a pool of so many blocks, on about `num_measured` of them."""
    show_progress(f"block_pool: {num_blocks:,} blocks")
    few, sweep = (
        Turns(num_blocks, block_size, in_use=in_use).measure(
            max(2, num_measured // in_use), changes_prompts=changes_prompts
        )
        for in_use, changes_prompts in ((FEW_BLOCKS, False), (num_blocks, True))
    )
    return Costs(num_blocks, few, sweep)


class Turns:
    """A pool, and rows that go through what becomes of their blocks."""

    def __init__(self, num_blocks: int, block_size: int, *, in_use: int) -> None:
        """Lets other rows fill and hold what is not in use."""
        self._block_size = block_size
        self.pool = BlockPool(num_blocks + ROWS_AT_ONCE, block_size)
        """With the blocks that a row on a hit has beside those it shares."""
        num_rows, num_used = num_blocks // BLOCKS_OF_ROW, in_use // BLOCKS_OF_ROW
        self._groups = _groups_of(range(num_used))
        for group in _groups_of(range(num_used, num_rows)):
            self.pool.reserve(self._new_rows(group))
            self.pool.reserve(self._filled(group, 0))

    def measure(self, num_rounds: int, *, changes_prompts: bool) -> dict[str, float]:
        """Gives nanoseconds a block, by operation: the median over rounds. The first round warms up."""
        rounds: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
        for _ in range(num_rounds + 1):
            rounds["take"].append(self._timed(self._new_rows))
            rounds["give_back"].append(self._timed(self._ended))
        for number in range(num_rounds + 1):
            prompts = number if changes_prompts else 0
            rounds["evict"].append(
                self._timed(self._new_rows)
            )  # in the first round there is nothing to evict
            rounds["share"].append(self._timed(partial(self._filled, number=prompts)))
            rounds["keep"].append(self._timed(self._ended))
            rounds["touch"].append(self._timed(partial(self._same_prompts, number=prompts), self._ended))
        assert self.pool.num_free == ROWS_AT_ONCE, f"{self.pool.num_free} blocks are free"
        return {operation: statistics.median(figures[1:]) for operation, figures in rounds.items()}

    def _timed(
        self,
        write: Callable[[Sequence[Row]], ReserveBlocks],
        undo: Callable[[Sequence[Row]], ReserveBlocks] | None = None,
    ) -> float:
        """Gives nanoseconds a block; what is asked is written just before, as in the engine."""
        seconds, num_blocks = 0.0, 0
        for group in self._groups:
            wish = write(group)
            start = time.thread_time()
            grant = self.pool.reserve(wish)
            seconds += time.thread_time() - start
            num_blocks += len(group) * BLOCKS_OF_ROW
            assert len(grant.admitted) == len(wish.admissions), f"{wish.admissions} do not fit"
            if undo is not None:
                assert grant.num_cached == [BLOCKS_OF_ROW * self._block_size] * len(group)
                self.pool.reserve(undo(group))
        return seconds / num_blocks * 1e9

    def _new_rows(self, group: Sequence[Row]) -> ReserveBlocks:
        num_tokens = BLOCKS_OF_ROW * self._block_size
        return _wish(admissions=[_admission(row, num_tokens, Ints(b""), []) for row in group])

    def _same_prompts(self, group: Sequence[Row], number: int) -> ReserveBlocks:
        """Asks for what `_filled` has filled, and a token more."""
        admissions: list[Admission] = []
        for row in group:
            tokens = self._tokens(row, number)
            keys = self._keys(tokens)
            tokens.append(0)
            admissions.append(_admission(row, len(tokens), Ints(tokens.tobytes()), keys))
        return _wish(admissions=admissions)

    def _filled(self, group: Sequence[Row], number: int) -> ReserveBlocks:
        """Says that each row's blocks are filled with a prompt of its own."""
        filled: list[FilledBlocks] = []
        for row in group:
            tokens = self._tokens(row, number)
            filled.append(FilledBlocks(row, 0, self._keys(tokens), ROOT, Ints(tokens.tobytes())))
        return _wish(filled=filled)

    def _ended(self, group: Sequence[Row]) -> ReserveBlocks:
        return _wish(released=list(group))

    def _tokens(self, row: Row, number: int) -> array[int]:
        return array("i", [row, number]) * (BLOCKS_OF_ROW * self._block_size // 2)

    def _keys(self, tokens: array[int]) -> list[bytes]:
        keys: list[bytes] = []
        extend_keys(keys, tokens, self._block_size, ROOT)
        return keys


def _groups_of(rows: range) -> list[list[Row]]:
    return [
        [Row(row) for row in rows[start : start + ROWS_AT_ONCE]]
        for start in range(0, len(rows), ROWS_AT_ONCE)
    ]


def _admission(row: Row, num_tokens: int, tokens: Ints, keys: list[bytes]) -> Admission:
    return Admission(
        row=row,
        num_tokens=num_tokens,
        tokens=tokens,
        keys=keys,
        root=ROOT,
        max_cached=num_tokens - 1,
        may_split=False,
        may_be_passed=False,
    )


def _wish(
    *,
    filled: Sequence[FilledBlocks] = (),
    released: Sequence[Row] = (),
    admissions: Sequence[Admission] = (),
) -> ReserveBlocks:
    return ReserveBlocks(list(filled), list(released), [], [], [], list(admissions), PLENTY)


# ---- a step --------------------------------------------------------------------------------------


def measure_caching(batch: int, block_size: int, num_steps: int, step_ms: float) -> dict[str, Any]:
    """Gives microseconds of a scheduler's step without and with prefix caching, and what it adds."""
    show_progress(f"block_pool: a step of {batch} rows")

    def us_per_step(*, shares_prefixes: bool) -> float:
        steady = SteadyBatch(batch, block_size, shares_prefixes=shares_prefixes)
        steady.run(num_steps // 4 + 200)
        return steady.run(num_steps) / num_steps * 1e6

    runs = {
        "off": lambda: us_per_step(shares_prefixes=False),
        "on": lambda: us_per_step(shares_prefixes=True),
    }
    off, on = (statistics.median(figures) for figures in alternate(runs, 3).values())
    return {  # Any: cells of a table
        "batch": batch,
        "block_size": block_size,
        "us_without": significant(off, 3),
        "us_with": significant(on, 3),
        "added_us": significant(on - off, 3),
        "added_percent": significant((on / off - 1) * 100, 3),
        "step_ms": step_ms,
        "percent_of_step": significant((on - off) / step_ms / 10, 3),
    }
