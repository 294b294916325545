"""Rows that compute through a block pool as the engine's do, their tokens known to the test."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

from megallm.core_async.messages import (
    Admission,
    BlockGrant,
    FilledBlocks,
    Ints,
    ReserveBlocks,
    Row,
    pack_ints,
)
from megallm.core_async.plan.block_pool import BlockPool
from megallm.core_async.plan.prefix import root_of

type KeyOf = Callable[[bytes, array[int]], bytes]

PLENTY = 10_000
"""Tokens of a step: more than any test here computes."""


def child_key(parent: bytes, tokens: array[int]) -> bytes:
    """Gives the key of the block that holds `tokens` after the block known as `parent`."""
    return sha256(parent + array("q", tokens).tobytes()).digest()


def rows_of(*numbers: int) -> list[Row]:
    """Gives rows."""
    return [Row(number) for number in numbers]


class Running:
    """A row: its tokens, and how many of them are computed."""

    def __init__(self, tokens: Sequence[int], root: bytes, *, shares: bool) -> None:
        self.tokens = list(tokens)
        self.root = root
        self.shares = shares
        """Whether its blocks are made known."""
        self.keys: list[bytes] = []
        self.num_computed = 0
        self.num_filled = 0


class Batch:
    """A block pool and the rows of a batch, in order of admission; `step` is one step of the engine.

    What a step computes is told to the pool in the next one, as the scheduler does.
    """

    def __init__(self, pool: BlockPool, block_size: int, key_of: KeyOf = child_key) -> None:
        self.pool = pool
        self.rows: dict[Row, Running] = {}
        self._block_size = block_size
        self._key_of = key_of
        self._offered: dict[Row, Running] = {}
        self._filled: list[FilledBlocks] = []

    def admission(
        self,
        row: int,
        tokens: Sequence[int],
        *,
        salt: str = "",
        shares: bool = True,
        max_cached: int | None = None,
        may_split: bool = True,
        may_be_passed: bool = False,
    ) -> Admission:
        """Gives what the allocator is told of a prompt that would run at a row."""
        running = Running(tokens, root_of(salt), shares=shares)
        self._extend_keys(running)
        self._offered[Row(row)] = running
        return Admission(
            row=Row(row),
            num_tokens=len(tokens),
            tokens=pack_ints(list(tokens)) if running.keys else Ints(b""),
            keys=running.keys.copy(),
            root=running.root,
            max_cached=len(tokens) - 1 if max_cached is None else max_cached,
            may_split=may_split,
            may_be_passed=may_be_passed,
        )

    def step(
        self,
        *admissions: Admission,
        grow: Mapping[int, int] | None = None,
        released: Sequence[int] = (),
        budget: int = PLENTY,
        token: int = 0,
    ) -> BlockGrant:
        """Releases rows, lets rows compute so many tokens more, and admits what the pool grants.

        `token`: what rows are given to compute where they know none.
        """
        for row in rows_of(*released):
            self.rows.pop(row, None)
        grow = {} if grow is None else {Row(row): num for row, num in grow.items() if row in self.rows}
        growing = [row for row in self.rows if row in grow]
        wish = ReserveBlocks(
            filled=self._filled,
            released=rows_of(*released),
            rows=growing,
            num_tokens=[self.rows[row].num_computed + grow[row] for row in growing],
            victims=list(self.rows),
            admissions=list(admissions),
            budget=budget,
        )
        self._filled = []
        grant = self.pool.reserve(wish)
        for row in grant.preempted:
            del self.rows[row]
        for row in growing:
            if row in self.rows and row not in grant.held:
                self._compute(row, grow[row], token)
        for index, num_cached, num_chunk in zip(
            grant.admitted, grant.num_cached, grant.num_chunk, strict=True
        ):
            row = admissions[index].row
            running = self.rows[row] = self._offered[row]
            running.num_computed = num_cached
            running.num_filled = num_cached // self._block_size
            self._compute(row, num_chunk, token)
        self._offered.clear()
        return grant

    def admit(self, row: int, tokens: Sequence[int], *, salt: str = "") -> int:
        """Admits a prompt that fits, computes all of it, and gives how many tokens were cached."""
        grant = self.step(self.admission(row, tokens, salt=salt))
        assert grant.admitted == [0]
        return grant.num_cached[0]

    def forget(self) -> None:
        """Changes the weights: nothing computed so far is shared any more."""
        self._filled = []
        self.pool.forget_prefixes()

    def _compute(self, row: Row, num_tokens: int, token: int) -> None:
        running = self.rows[row]
        running.num_computed += num_tokens
        running.tokens += [token] * (running.num_computed - len(running.tokens))
        if not running.shares:
            return
        self._extend_keys(running)
        size = self._block_size
        start, end = running.num_filled, running.num_computed // size
        if start < end:
            tokens = pack_ints(running.tokens[start * size : end * size])
            parent = running.keys[start - 1] if start else running.root
            self._filled.append(FilledBlocks(row, start, running.keys[start:end], parent, tokens))
            running.num_filled = end

    def _extend_keys(self, running: Running) -> None:
        size = self._block_size
        for start in range(len(running.keys) * size, len(running.tokens) - size + 1, size):
            if running.shares:
                above = running.keys[-1] if running.keys else running.root
                running.keys.append(self._key_of(above, array("i", running.tokens[start : start + size])))
