"""What one block costs the block pool, small or large, and what prefix caching costs a step.

`take`, `give_back`, `share`, `keep`, `touch` and `evict` are what becomes of a block: it leaves the
free ones; returns to them; is made known when it is filled; stays in the cache when nobody holds it
any more; is found there by another prompt; and is given up for a new one. Rows hold 50 blocks, and
come ten at a time.

`ns_per_block` is taken on the same thousand blocks over and over while others hold all the rest,
known as well: what grows with the size of the pool shows in it. `sweep_ns_per_block` goes through
the whole pool, so that each block comes round as the one used longest ago: with a million of them
it is the processor's caches that it measures, and the dictionary's growth.

The second table is a scheduler's step, the real roster and pool without the actors: a batch that
decodes, whose requests end and are followed by others with random prompts, so that all is hashed
and nothing is found. All times are CPU time of the thread.
"""

import argparse
import random
import statistics
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import Struct

from benchmarks.load import SEED
from benchmarks.measure import alternate
from benchmarks.report import Report, Table, significant
from megallm.core_async.messages import (
    Admission,
    FilledBlock,
    Ints,
    NewRequest,
    RequestId,
    ReserveBlocks,
    Row,
    Sampling,
    StepResult,
    TextSpec,
    pack_ints,
)
from megallm.core_async.plan.block_pool import BlockPool
from megallm.core_async.plan.flight import Outcome
from megallm.core_async.plan.policy import Limits
from megallm.core_async.plan.prefix import ROOT, extend_keys
from megallm.core_async.plan.roster import Roster

BLOCKS_OF_ROW: Final = 50
ROWS_AT_ONCE: Final = 10
FEW_BLOCKS: Final = 1000
"""Blocks that are in use while the others are held."""
OPERATIONS: Final = ("take", "give_back", "evict", "share", "keep", "touch")
PLENTY: Final = 1 << 40
"""A budget that never binds."""
DEPTH: Final = 2
"""Plans in flight, as in the engine."""


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
    add("--block-size", type=int, default=16, metavar="N", help="tokens of a block (default: %(default)s)")
    add("--batch", type=int, default=256, metavar="N", help="rows that decode (default: %(default)s)")
    add("--steps", type=int, default=2000, metavar="N", help="scheduler's steps (default: %(default)s)")
    add(
        "--step-ms",
        type=float,
        default=12.0,
        metavar="MS",
        help="what the model takes for one (default: %(default)s, 8B and 256 decoding rows on an H200)",
    )


def run(options: argparse.Namespace) -> Report:
    """Measures both."""
    if (smallest := min(options.sizes)) < FEW_BLOCKS:
        raise ValueError(f"sizes holds {smallest}; a pool must have at least {FEW_BLOCKS} blocks")
    costs = [measure_blocks(size, options.block_size, options.blocks) for size in options.sizes]
    share = measure_caching(options.batch, options.block_size, options.steps, options.step_ms)
    columns = ("operation", "num_blocks", "ns_per_block", "ratio", "sweep_ns_per_block", "sweep_ratio")
    results: list[dict[str, object]] = []
    for operation in OPERATIONS:
        for cost in costs:
            figures = (cost.few[operation], cost.sweep[operation])
            few, sweep = (significant(figure, 3) for figure in figures)
            first = costs[0]
            ratios = (figures[0] / first.few[operation], figures[1] / first.sweep[operation])
            cells = (
                operation,
                cost.num_blocks,
                few,
                significant(ratios[0], 3),
                sweep,
                significant(ratios[1], 3),
            )
            results.append(dict(zip(columns, cells, strict=True)))
    rows: list[Any] = [tuple(row.values()) for row in results]  # Any: cells, by column
    return Report(
        "block_pool",
        [
            Table(f"Blocks of {options.block_size} tokens; ratios to the first pool", columns, rows),
            Table(
                "A scheduler's step without and with prefix caching, no hits",
                tuple(share),
                [tuple(share.values())],
            ),
        ],
        [*results, share],
    )


# ---- a block -------------------------------------------------------------------------------------


class Costs(Struct, frozen=True):
    """Nanoseconds a block, by operation."""

    num_blocks: int
    few: dict[str, float]
    sweep: dict[str, float]


def measure_blocks(num_blocks: int, block_size: int, num_measured: int) -> Costs:
    """Measures each operation in a pool of so many blocks, on about `num_measured` of them."""
    print(f"block_pool: {num_blocks:,} blocks", file=sys.stderr)
    few = Turns(num_blocks, block_size, in_use=FEW_BLOCKS)
    sweep = Turns(num_blocks, block_size, in_use=num_blocks)
    return Costs(
        num_blocks,
        few.measure(max(2, num_measured // FEW_BLOCKS)),
        sweep.measure(max(2, num_measured // num_blocks)),
    )


class Turns:
    """A pool, and rows that go through what becomes of their blocks."""

    def __init__(self, num_blocks: int, block_size: int, *, in_use: int) -> None:
        """Lets other rows fill and hold what is not in use."""
        self._block_size = block_size
        self._pool = BlockPool(num_blocks + ROWS_AT_ONCE, block_size)
        """With the blocks that a row on a hit has beside those it shares."""
        num_rows, num_used = num_blocks // BLOCKS_OF_ROW, in_use // BLOCKS_OF_ROW
        self._groups = _groups_of(range(num_used))
        for group in _groups_of(range(num_used, num_rows)):
            self._pool.reserve(self._new_rows(group))
            self._pool.reserve(self._filled(group, 0))

    def measure(self, num_rounds: int) -> dict[str, float]:
        """Gives nanoseconds a block, by operation: the median over rounds. The first round warms up."""
        rounds: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
        for _ in range(num_rounds + 1):
            rounds["take"].append(self._timed(self._new_rows))
            rounds["give_back"].append(self._timed(self._ended))
        for number in range(num_rounds + 1):
            rounds["evict"].append(self._timed(self._new_rows))  # but in the first round
            rounds["share"].append(self._timed(lambda group, number=number: self._filled(group, number)))
            rounds["keep"].append(self._timed(self._ended))
            rounds["touch"].append(
                self._timed(lambda group, number=number: self._same_prompts(group, number), self._ended)
            )
        assert self._pool.num_free == ROWS_AT_ONCE, f"{self._pool.num_free} blocks are free"
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
            grant = self._pool.reserve(wish)
            seconds += time.thread_time() - start
            num_blocks += len(group) * BLOCKS_OF_ROW
            assert len(grant.admitted) == len(wish.admissions), f"{wish.admissions} do not fit"
            if undo is not None:
                assert grant.num_cached == [BLOCKS_OF_ROW * self._block_size] * len(group)
                self._pool.reserve(undo(group))
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
        filled: list[FilledBlock] = []
        size = self._block_size
        for row in group:
            tokens = self._tokens(row, number)
            parent = ROOT
            for place, key in enumerate(self._keys(tokens)):
                block = Ints(tokens[place * size : (place + 1) * size].tobytes())
                filled.append(FilledBlock(row, place, key, parent, block))
                parent = key
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
    filled: Sequence[FilledBlock] = (),
    released: Sequence[Row] = (),
    admissions: Sequence[Admission] = (),
) -> ReserveBlocks:
    return ReserveBlocks(list(filled), list(released), [], [], [], list(admissions), PLENTY)


# ---- a step --------------------------------------------------------------------------------------


def measure_caching(batch: int, block_size: int, num_steps: int, step_ms: float) -> dict[str, Any]:
    """Gives microseconds of a scheduler's step without and with prefix caching, and what it adds."""
    print(f"block_pool: a step of {batch} rows", file=sys.stderr)

    def us_per_step(*, shares_prefixes: bool) -> float:
        steady = Steady(batch, block_size, shares_prefixes=shares_prefixes)
        steady.run(num_steps // 4 + 200)
        return steady.run(num_steps) / num_steps * 1e6

    runs = {
        "off": lambda: us_per_step(shares_prefixes=False),
        "on": lambda: us_per_step(shares_prefixes=True),
    }
    off, on = (statistics.median(figures) for figures in alternate(runs, 3).values())
    return {  # Any: cells of a table
        "batch": batch,
        "us_without": significant(off, 3),
        "us_with": significant(on, 3),
        "added_us": significant(on - off, 3),
        "added_percent": significant((on / off - 1) * 100, 3),
        "step_ms": step_ms,
        "percent_of_step": significant((on - off) / step_ms / 10, 3),
    }


class Steady:
    """A batch that stays full: whoever ends is followed by another, with a prompt of its own."""

    PROMPTS: Final = (256, 768)
    """Tokens, at least and at most."""
    OUTPUTS: Final = (64, 192)

    def __init__(self, batch: int, block_size: int, *, shares_prefixes: bool) -> None:
        self._random = random.Random(SEED)
        blocks_of_row = -(-(self.PROMPTS[1] + self.OUTPUTS[1]) // block_size)
        self._pool = BlockPool(2 * batch * blocks_of_row, block_size)
        limits = Limits(
            max_tokens=batch * self.PROMPTS[1],
            max_requests=batch,
            block_size=block_size,
            chunks_prompts=False,
            shares_prefixes=shares_prefixes,
        )
        self._roster = Roster(limits, num_blocks=self._pool.num_blocks, max_waiting=2 * batch)
        self._pending: deque[StepResult] = deque()
        self._num_requests = 0
        self._submit(batch)

    def run(self, num_steps: int) -> float:
        """Runs so many steps, and gives the scheduler's seconds."""
        seconds = 0.0
        for _ in range(num_steps):
            outcome = Outcome()
            result = self._pending.popleft() if len(self._pending) == DEPTH else None
            start = time.thread_time()
            if result is not None:
                self._roster.apply(result, outcome)
                self._roster.forget_finished(outcome)
            seconds += time.thread_time() - start
            self._submit(len(outcome.finished))
            start = time.thread_time()
            self._plan()
            seconds += time.thread_time() - start
        stats = self._roster.stats()
        assert (stats.prefix_hit_rate, stats.preemptions) == (0, 0), f"not what was to be measured: {stats}"
        return seconds

    def _plan(self) -> None:
        choice = self._roster.choose()
        wish = self._roster.wish(choice)
        grant = None
        if wish is not None:
            grant = self._pool.reserve(wish)
            self._roster.settle(choice, grant, 0.0)
        plan = self._roster.commit(choice, grant)
        assert plan is not None, "nothing to compute"
        self._pending.append(StepResult(plan.step, pack_ints([1] * plan.samples.count(1))))

    def _submit(self, num_requests: int) -> None:
        """Queues requests with random prompts."""
        draw, requests = self._random, list[NewRequest]()
        for _ in range(num_requests):
            self._num_requests += 1
            key = RequestId(self._num_requests)
            prompt = draw.choices(range(100_000), k=draw.randint(*self.PROMPTS))
            output = draw.randint(*self.OUTPUTS)
            requests.append(NewRequest(key, pack_ints(prompt), output, (), Sampling(), TextSpec(key)))
        self._roster.submit(requests)
