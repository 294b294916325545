"""Which row holds which block of the KV cache. Pure; knows no request, no token id, no tensor.

Blocks that nobody holds are a stack: taking and giving back cost O(1) a block, and what was used
last is used next. A block changes hands in `_take` and `_give_back` and nowhere else.
"""

from collections import Counter, defaultdict

from megallm.core_async.messages import BlockGrant, BlockId, Row


class BlockPool:
    """Owns the block tables of all rows and the stack of free blocks.

    Every block is at any time in exactly one place: once in one row's table, or once on the stack.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, f"a pool of {num_blocks} blocks"
        assert block_size > 0, f"blocks of {block_size} tokens"
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        """The last is taken first."""
        self._tables: dict[Row, list[BlockId]] = {}
        """Rows that hold a block or more."""
        self._rooms: defaultdict[Row, int] = defaultdict(int)
        """Tokens that a row's blocks have room for: most rows of most steps need no more look than this."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, held or free."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that some row holds."""
        return self._num_blocks - len(self._free)

    def table(self, row: Row) -> list[BlockId]:
        """Gives a copy of the row's block table; empty when it holds none."""
        return self._tables.get(row, []).copy()

    def release(self, row: Row) -> None:
        """Gives back all blocks of a row, if it holds any."""
        table = self._tables.pop(row, None)
        if table is not None:
            del self._rooms[row]
            self._give_back(table)

    def reserve(
        self,
        released: list[Row],
        rows: list[Row],
        num_tokens: list[int],
        num_running: int,
        victims: list[Row],
    ) -> BlockGrant:
        """Does what `ReserveBlocks` says, which is the contract."""
        for row in released:
            self.release(row)
        assert len(rows) == len(num_tokens), f"{len(rows)} rows, {len(num_tokens)} numbers of tokens"
        running, rooms = rows[:num_running], self._rooms
        short = [
            (row, wanted) for row, wanted in zip(running, num_tokens, strict=False) if wanted > rooms[row]
        ]
        draft = _Draft()
        preempted: list[Row] = []
        for row, wanted in short:
            num_missing = self._num_missing(row, wanted)
            if row not in preempted and num_missing > len(self._free):
                preempted += self._make_room(row, num_missing, running, victims, len(preempted))
            if row in preempted:
                break  # and so is all that comes after it
            self._extend(row, num_missing, draft)
        num_admitted = 0 if preempted else self._admit(rows[num_running:], num_tokens[num_running:], draft)
        return BlockGrant(
            num_admitted=num_admitted,
            preempted=preempted,
            changed_rows=draft.rows,
            changed_starts=draft.starts,
            changed_counts=draft.counts,
            blocks=draft.blocks,
            num_free=len(self._free),
        )

    def check(self) -> None:
        """Asserts that each block is in exactly one place, and that the counts say so."""
        places = Counter(self._free)
        for row, table in self._tables.items():
            assert table, f"row {row} is listed and holds no block"
            places.update(table)
        ids = [BlockId(block) for block in range(self._num_blocks)]
        odd = {block: places[block] for block in ids if places[block] != 1}
        assert not odd, f"blocks, and the number of places that hold them: {odd}"
        strange = sorted(places.keys() - set(ids))
        assert not strange, f"block ids {strange} are not of this pool of {self._num_blocks}"
        num_held = sum(map(len, self._tables.values()))
        assert num_held == self.num_used, f"rows hold {num_held} blocks, counted {self.num_used}"
        rooms = {row: len(table) * self._block_size for row, table in self._tables.items()}
        counted = {row: room for row, room in self._rooms.items() if room}
        assert counted == rooms, f"rows have room for tokens {rooms}, counted {counted}"

    # ---- who gets what -------------------------------------------------------------------------

    def _num_missing(self, row: Row, num_tokens: int) -> int:
        """Gives how many blocks a row wants beyond those it holds."""
        num_wanted = -(-num_tokens // self._block_size)
        assert 0 < num_wanted <= self._num_blocks, (
            f"row {row} wants {num_wanted} blocks for {num_tokens} tokens, the pool has {self._num_blocks}"
        )
        return num_wanted - self._rooms[row] // self._block_size

    def _make_room(
        self, row: Row, num_missing: int, running: list[Row], victims: list[Row], num_gone: int
    ) -> list[Row]:
        """Takes blocks away until `row` fits or has lost its own; gives who lost theirs, in that order.

        The last `num_gone` of `victims` yielded before.
        """
        places = {victim: place for place, victim in enumerate(victims)}
        order = [places.get(each, -1) for each in running]
        assert -1 not in order, f"running rows {running} are not all among the victims {victims}"
        assert order == sorted(order), f"running rows {running} are not in the order of the victims {victims}"
        yielded: list[Row] = []
        last = len(victims) - num_gone
        for victim in reversed(victims[places[row] + 1 : last]):
            self.release(victim)
            yielded.append(victim)
            if num_missing <= len(self._free):
                return yielded
        if places[row] > 0:
            self.release(row)
            return [*yielded, row]
        others = sorted(self._tables.keys() - {row})
        raise AssertionError(
            f"row {row}, the first of all, lacks {num_missing} blocks and only {len(self._free)} are free: "
            f"rows {others} hold some of the {self._num_blocks} and are not among the victims"
        )

    def _admit(self, rows: list[Row], num_tokens: list[int], draft: "_Draft") -> int:
        """Grants from the first on while the free blocks last; gives how many got theirs."""
        for num_admitted, (row, wanted) in enumerate(zip(rows, num_tokens, strict=True)):
            assert row not in self._tables, (
                f"row {row} is to be admitted and holds blocks {self._tables[row]}"
            )
            num_missing = self._num_missing(row, wanted)
            if num_missing > len(self._free):
                return num_admitted
            self._extend(row, num_missing, draft)
        return len(rows)

    # ---- changing hands ------------------------------------------------------------------------

    def _extend(self, row: Row, count: int, draft: "_Draft") -> None:
        assert count > 0, f"row {row} would grow by {count} blocks: it is listed twice"
        table = self._tables.setdefault(row, [])
        blocks = self._take(count)
        draft.rows.append(row)
        draft.starts.append(len(table))
        draft.counts.append(count)
        draft.blocks += blocks
        table += blocks
        self._rooms[row] += count * self._block_size

    def _take(self, count: int) -> list[BlockId]:
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        return taken

    def _give_back(self, blocks: list[BlockId]) -> None:
        self._free += reversed(blocks)


class _Draft:
    """The columns of a `BlockGrant` while they grow."""

    __slots__ = ("blocks", "counts", "rows", "starts")

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.blocks: list[BlockId] = []
