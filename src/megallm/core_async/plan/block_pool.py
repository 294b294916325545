"""Who holds which block of the KV cache, and which blocks hold a prefix that others may share. Pure.

A block is in exactly one place: free, cached (nobody holds it, a prefix may find it), or held by
one row or several. Taking, giving back and touching cost O(1) a block. A shared block is never
written: at least the last token of a request is computed anew, into a block of its own.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Self

from megallm.core_async.config import EngineConfig
from megallm.core_async.messages import Admission, BlockGrant, BlockId, FilledBlocks, ReserveBlocks, Row
from megallm.core_async.plan.draft import Draft
from megallm.core_async.plan.prefix import PrefixIndex
from megallm.core_async.plan.prefix_changes import PrefixChanges
from megallm.core_async.plan.recently_used import RecentlyUsed


class BlockPool:
    """Owns the block tables of all rows, the free blocks and the cached ones.

    `keeps_cached`: a known block that nobody holds stays until its room is needed, the least
    recently used first and leaves before their parents (LRU); else it is free at once (REF_ZERO).
    `max_held`: blocks that rows may keep, all together, which sit out for want of more.
    `changes`: where it is noted which prefixes become known and are forgotten.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        keeps_cached: bool = True,
        max_held: int = 0,
        changes: PrefixChanges | None = None,
    ) -> None:
        assert num_blocks > 0, f"a pool of {num_blocks} blocks"
        assert block_size > 0, f"blocks of {block_size} tokens"
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._keeps_cached = keeps_cached
        self._max_held = max_held
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        """The next to be taken is the last."""
        self._cached = RecentlyUsed(num_blocks)
        """The next to be evicted is the first."""
        self._num_more: dict[BlockId, int] = {}
        """Rows that hold a block beside the first, where there are any."""
        self._tables: dict[Row, list[BlockId]] = {}
        """Rows that hold a block or more."""
        self._index = PrefixIndex(num_blocks, block_size, changes)
        self._coming: dict[bytes, Row] = {}
        """Keys of blocks that a row is about to fill: who wants one waits for it."""
        self._coming_of: dict[Row, list[bytes]] = {}
        """The same keys by row, those that were filled included."""
        self._unshared: set[Row] = set()
        """Rows that began before the prefixes were forgotten: none of their blocks is made known."""

    @classmethod
    def of(cls, config: EngineConfig, changes: PrefixChanges | None = None) -> Self:
        """Gives an engine's: without prefix caching nothing stays, forks' blocks neither."""
        return cls(
            config.num_blocks,
            config.block_size,
            keeps_cached=config.keeps_cached and config.shares_prefixes,
            max_held=config.max_held_blocks,
            changes=changes,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and no prefix finds."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and a prefix may find."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that some row holds."""
        return self._num_blocks - len(self._free) - len(self._cached)

    def contents(self) -> list[BlockId]:
        """Gives the blocks that some row holds or a prefix may find, ascending; O(blocks of the pool)."""
        free = set(self._free)
        return [block for block in map(BlockId, range(self._num_blocks)) if block not in free]

    def table(self, row: Row) -> list[BlockId]:
        """Gives a copy of the row's block table; empty when it holds none."""
        return self._tables.get(row, []).copy()

    def reserve(self, wish: ReserveBlocks) -> BlockGrant:
        """Does what `ReserveBlocks` says, which is the contract."""
        self._share(wish.filled)
        for row in wish.released:
            self.release(row)
        draft = Draft()
        self._grow(wish, draft)
        if not (draft.preempted or draft.held):
            self._admit(wish.admissions, wish.budget, len(wish.victims), draft)
        return draft.grant(num_free=len(self._free), num_cached_blocks=len(self._cached))

    def release(self, row: Row) -> None:
        """Gives back all blocks of a row; a row that holds none stays as it is."""
        self._unshared.discard(row)
        for key in self._coming_of.pop(row, ()):
            if self._coming.get(key) == row:
                del self._coming[key]
        table = self._tables.pop(row, None)
        if table is not None:
            self._give_back(table)

    def forget_prefixes(self) -> None:
        """Makes every block unknown, and what rows hold now stays so."""
        self._index.clear()
        self._free += self._cached.take_oldest(len(self._cached))
        self._coming.clear()
        self._coming_of.clear()
        self._unshared.update(self._tables)

    def check(self) -> None:
        """Asserts that each block is in exactly one place, and that the counts say so."""
        held = Counter(block for table in self._tables.values() for block in table)
        places = Counter([*self._free, *self._cached, *held])
        odd = {block: places[block] for block in map(BlockId, range(self._num_blocks)) if places[block] != 1}
        assert not odd, f"blocks, and the number of places that hold them: {odd}"
        assert places.total() == self._num_blocks, f"{places.total()} places for {self._num_blocks} blocks"
        shared = {block: count - 1 for block, count in held.items() if count > 1}
        assert shared == self._num_more, f"rows beside the first: {shared}, counted {self._num_more}"
        unknown = [block for block in self._cached if block not in self._index]
        assert not unknown, f"blocks {unknown} are cached and no prefix finds them"
        known_free = [block for block in self._free if block in self._index]
        assert not known_free, f"blocks {known_free} are free and a prefix finds them"
        self._index.check()

    # ---- who gets what -------------------------------------------------------------------------

    def _grow(self, wish: ReserveBlocks, draft: Draft) -> None:
        """Gives running rows the blocks they lack, in order, and takes from the last where it must."""
        columns = zip(wish.rows, wish.num_tokens, strict=True)
        missing = [self._num_missing(row, num_tokens) for row, num_tokens in columns]
        if (total := sum(missing)) <= self._num_available:
            self._extend_all(wish.rows, missing, total, draft)
            return
        assert _is_ordered(wish.rows, wish.victims), (
            f"running rows {wish.rows} are not in the order of the victims {wish.victims}"
        )
        num_held = 0
        for row, num_missing in zip(wish.rows, missing, strict=True):
            if row not in self._tables:
                return  # it yielded, and so did all that come after it
            if not num_missing:
                continue
            num_own = len(self._tables[row])
            is_short = num_missing > self._num_available
            if is_short and row != wish.victims[0] and num_held + num_own <= self._max_held:
                draft.held.append(row)
                num_held += num_own
                continue
            while num_missing > self._num_available:
                victim = wish.victims[-1 - len(draft.preempted)]
                assert row != wish.victims[0] or victim != row, (
                    f"row {row}, the first of all, lacks {num_missing} blocks and only {self._num_available}"
                    f" of {self._num_blocks} can be had"
                )
                self.release(victim)
                draft.preempted.append(victim)
                if victim == row:
                    return
            self._extend(row, num_missing, draft)

    def _admit(self, admissions: Sequence[Admission], budget: int, num_running: int, draft: Draft) -> None:
        """Grants what fits, in order. One block for each running row stays out of it, so that it can grow."""
        for index, admission in enumerate(admissions):
            if budget <= 0 or num_running >= self._num_available:
                return
            found = self._find(admission)
            num_cached = len(found) * self._block_size
            num_missing = admission.num_tokens - num_cached
            if self._is_coming(admission, len(found)):
                continue
            fits_budget = num_missing <= budget or admission.may_split
            num_idle = len(self._cached.present(found)) if found else 0
            num_wanted = self._blocks_for(admission.num_tokens) - len(found) + num_idle
            if not fits_budget or num_wanted + num_running > self._num_available:
                if not admission.may_be_passed:
                    return
                continue
            num_chunk = min(num_missing, budget)
            self._start(admission, found, num_cached + num_chunk, draft)
            draft.admitted.append(index)
            draft.num_cached.append(num_cached)
            draft.num_chunk.append(num_chunk)
            budget -= num_chunk
            num_running += 1

    def _start(self, admission: Admission, found: list[BlockId], num_tokens: int, draft: Draft) -> None:
        """Gives a row its shared blocks and new ones after them."""
        row = admission.row
        assert row not in self._tables, f"row {row} is to be admitted and holds {self._tables[row]}"
        if found:
            idle = self._cached.present(found)
            self._cached.remove(idle)
            if len(idle) < len(found):
                self._hold_too(set(found).difference(idle))
            self._tables[row] = found.copy()
            draft.change(row, 0, found)
        num_new = self._blocks_for(num_tokens) - len(found)
        if num_new:
            self._extend(row, num_new, draft)
        if coming := admission.keys[len(found) :]:
            self._coming_of[row] = coming
            for key in coming:
                self._coming.setdefault(key, row)

    def _find(self, admission: Admission) -> list[BlockId]:
        if not admission.keys:
            return []
        most = min(admission.max_cached, admission.num_tokens - 1) // self._block_size
        return self._index.find(admission.keys, admission.tokens, root=admission.root, most=most)

    def _is_coming(self, admission: Admission, num_found: int) -> bool:
        """Whether the next block that the request could share is being computed by another."""
        most = min(admission.max_cached, admission.num_tokens - 1) // self._block_size
        return num_found < min(most, len(admission.keys)) and admission.keys[num_found] in self._coming

    # ---- changing hands ------------------------------------------------------------------------

    @property
    def _num_available(self) -> int:
        return len(self._free) + len(self._cached)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _num_missing(self, row: Row, num_tokens: int) -> int:
        """Gives how many blocks a running row wants beyond those it holds."""
        num_wanted = self._blocks_for(num_tokens)
        assert 0 < num_wanted <= self._num_blocks, (
            f"row {row} wants {num_wanted} blocks for {num_tokens} tokens, the pool has {self._num_blocks}"
        )
        assert row in self._tables, f"row {row} is to grow and holds no block"
        return max(0, num_wanted - len(self._tables[row]))

    def _extend(self, row: Row, count: int, draft: Draft) -> None:
        table = self._tables.setdefault(row, [])
        blocks = self._take(count)
        draft.change(row, len(table), blocks)
        table += blocks

    def _extend_all(self, rows: Sequence[Row], counts: list[int], total: int, draft: Draft) -> None:
        """Gives each row so many blocks, `total` in all, taken at once."""
        blocks, start = self._take(total), 0
        for row, count in zip(rows, counts, strict=True):
            if count:
                table, end = self._tables[row], start + count
                draft.change(row, len(table), blocks[start:end])
                table += blocks[start:end]
                start = end

    def _take(self, count: int) -> list[BlockId]:
        """Takes blocks from the free ones, then from the cached, the least recently used first."""
        free = self._free
        num_free = min(count, len(free))
        taken = free[: -num_free - 1 : -1]
        del free[len(free) - num_free :]
        if num_free < count:
            evicted = self._cached.take_oldest(count - num_free)
            self._index.forget(evicted)
            taken += evicted
        return taken

    def _hold_too(self, blocks: Iterable[BlockId]) -> None:
        """Counts one more holder of blocks that are held."""
        for block in blocks:
            self._num_more[block] = self._num_more.get(block, 0) + 1

    def _let_go(self, blocks: list[BlockId]) -> list[BlockId]:
        """Ends one row's hold of blocks; gives those that nobody holds any more."""
        more = self._num_more
        if not more or more.keys().isdisjoint(blocks):
            return blocks
        idle: list[BlockId] = []
        for block in blocks:
            count = more.get(block)
            if count is None:
                idle.append(block)
            elif count == 1:
                del more[block]
            else:
                more[block] = count - 1
        return idle

    def _give_back(self, table: list[BlockId]) -> None:
        """Ends one row's hold, last block first: a leaf is then evicted before its parent."""
        idle = self._let_go(table[::-1])
        if self._keeps_cached:
            idle = self._keep(idle)
        self._index.forget(idle)
        self._free += idle

    def _keep(self, idle: list[BlockId]) -> list[BlockId]:
        """Caches those of the blocks that are found, gives the others; a use of a copy is its first's."""
        index, cached = self._index, self._cached
        if not index.has_copies_among(idle):
            found, unknown = index.split(idle)
            cached.add(found)
            return unknown
        freed: list[BlockId] = []
        for block in idle:
            first = index.first_of(block)
            if first == block:
                cached.add([block])
                continue
            freed.append(block)
            if first is not None and first in cached:  # used just now, by its copy
                cached.remove([first])
                cached.add([first])
        return freed

    def _share(self, fills: Sequence[FilledBlocks]) -> None:
        """Makes filled blocks known, and nobody waits for them any more."""
        coming = self._coming
        for filled in fills:
            if filled.row in self._unshared:
                continue
            if coming:
                for key in filled.keys:
                    coming.pop(key, None)
            table, start = self._tables[filled.row], filled.start
            blocks = table[start : start + len(filled.keys)]
            self._index.add(blocks, filled, table[start - 1] if start else None)


def _is_ordered(rows: Sequence[Row], victims: Sequence[Row]) -> bool:
    """Whether `rows` are some of `victims`, in their order."""
    rest = iter(victims)
    return all(row in rest for row in rows)
