"""A block pool under watch: it fails at the first grant that breaks the contract of `ReserveBlocks`.

The watch is a slow model of what the pool is to do. It knows a block by the whole prefix that was
computed into it, never by a key.
"""

from collections import Counter
from collections.abc import Iterator

from megallm.core_async.messages import Admission, BlockGrant, BlockId, FilledBlocks, ReserveBlocks, Row
from megallm.core_async.plan.block_pool import BlockPool

type Prefix = tuple[bytes, bytes]
"""(root, token ids)."""

MIXED = b"mixed"
"""The root of what was computed across a change of the weights."""


class WatchedPool(BlockPool):
    """A block pool whose every grant is looked at.

    `has_weak_keys`: several prefixes have one key. What is served must be right all the same, but
    what can be shared is not foretold.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        keeps_cached: bool = True,
        max_held: int = 0,
        has_weak_keys: bool = False,
    ) -> None:
        super().__init__(num_blocks, block_size, keeps_cached=keeps_cached, max_held=max_held)
        self._is_reserving = False
        self.watch = Watch(
            num_blocks,
            block_size,
            keeps_cached=keeps_cached,
            max_held=max_held,
            has_weak_keys=has_weak_keys,
        )

    def reserve(self, wish: ReserveBlocks) -> BlockGrant:
        self.watch.fill(wish.filled)
        self._is_reserving = True
        grant = super().reserve(wish)
        self._is_reserving = False
        self.watch.follow(wish, grant)
        self.check()
        return grant

    def release(self, row: Row) -> None:
        super().release(row)
        if not self._is_reserving:
            self.watch.release(row)

    def forget_prefixes(self) -> None:
        super().forget_prefixes()
        self.watch.forget_prefixes()
        self.check()

    def check(self) -> None:
        super().check()
        watch = self.watch
        for row, table in watch.tables.items():
            assert self.table(row) == table
        assert self.num_used == len(watch.holders)
        watch.check_writers()
        if not watch.has_weak_keys:
            assert (self.num_free, self.num_cached) == (watch.num_free, len(watch.idle))
            watch.check_idle()


class Watch:
    """Follows a pool's grants."""

    def __init__(
        self, num_blocks: int, block_size: int, *, keeps_cached: bool, max_held: int, has_weak_keys: bool
    ) -> None:
        self._max_held = max_held
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._keeps_cached = keeps_cached
        self.has_weak_keys = has_weak_keys
        self.tables: dict[Row, list[BlockId]] = {}
        self.holders = Counter[BlockId]()
        self.idle: list[BlockId] = []
        """Cached and held by nobody, the next to be evicted first."""
        self._roots: dict[Row, bytes] = {}
        self._computed: dict[Row, bytes] = {}
        """Token ids of the complete blocks of each row, shared ones included."""
        self._prefixes: dict[BlockId, Prefix] = {}
        self._found: dict[Prefix, BlockId] = {}
        self._coming: dict[Prefix, Row] = {}
        self.num_hits = 0
        """Blocks that were shared so far."""
        self.num_evicted = 0

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds."""
        return self._num_blocks - len(self.holders)

    @property
    def num_free(self) -> int:
        """Blocks that are neither held nor cached."""
        return self.num_available - len(self.idle)

    def check_writers(self) -> None:
        """Fails when a block that a row has yet to fill is anybody else's, or may be shared."""
        assert self.holders == Counter(block for table in self.tables.values() for block in table)
        for row, table in self.tables.items():
            for block in table[len(self._computed[row]) // (4 * self._block_size) :]:
                assert self.holders[block] == 1, (
                    f"block {block}, which row {row} writes, has others to hold it"
                )
                assert block not in self._prefixes, f"block {block}, which row {row} writes, may be shared"

    def check_idle(self) -> None:
        """Fails when a cached block can't be found, for want of what comes before it."""
        for block in self.idle:
            root, tokens = self._prefixes[block]
            above = (root, tokens[: -4 * self._block_size])
            assert not above[1] or above in self._found, f"block {block} is cached and its parent is not"

    # ---- what is told --------------------------------------------------------------------------

    def fill(self, filled: list[FilledBlocks]) -> None:
        """Follows the blocks that are filled; a row fills its own, one after the other."""
        for each in filled:
            row = each.row
            if self._roots[row] == MIXED:
                continue
            width = 4 * self._block_size
            assert len(self._computed[row]) == each.start * width
            assert len(each.tokens) == len(each.keys) * width
            self._computed[row] += each.tokens
            for place in range(each.start, each.start + len(each.keys)):
                prefix = (self._roots[row], self._computed[row][: (place + 1) * width])
                self._coming.pop(prefix, None)
                block = self.tables[row][place]
                self._prefixes[block] = prefix
                self._found.setdefault(prefix, block)

    def release(self, row: Row) -> None:
        """Follows the end of a row, last block first."""
        self._coming = {prefix: owner for prefix, owner in self._coming.items() if owner != row}
        table = self.tables.pop(row, [])
        self._let_go(table)
        for block in reversed(table):
            prefix = self._prefixes.get(block)
            if block in self.holders or self.has_weak_keys:
                continue
            if prefix is None or not self._keeps_cached:
                self._drop(block)
                continue
            found = self._found[prefix]
            if found != block:
                self._drop(block)
            if found in self.idle:
                self.idle.remove(found)
            if found not in self.holders:
                self.idle.append(found)
        self._roots.pop(row, None)
        self._computed.pop(row, None)

    def forget_prefixes(self) -> None:
        """Follows a change of the weights: what rows hold is of the old ones, or of both."""
        self._prefixes.clear()
        self._found.clear()
        self._coming.clear()
        self.idle.clear()
        for row in self.tables:
            self._roots[row] = MIXED

    # ---- what is granted -----------------------------------------------------------------------

    def follow(self, wish: ReserveBlocks, grant: BlockGrant) -> None:
        """Follows a grant."""
        for row in wish.released:
            self.release(row)
        num_preempted = len(grant.preempted)
        assert grant.preempted == wish.victims[::-1][:num_preempted]
        assert num_preempted < max(1, len(wish.victims)), "the first of all yielded"
        assert set(grant.held) <= set(wish.rows) - set(grant.preempted)
        assert not grant.admitted or not (grant.preempted or grant.held)
        changes = changes_of(grant)
        self._follow_growth(wish, grant, changes)
        if not (grant.preempted or grant.held):
            self._follow_admissions(wish, grant, changes)
        assert not changes, f"nobody asked for {changes}"
        assert grant.num_free + grant.num_cached_blocks == self.num_available

    def _follow_growth(
        self, wish: ReserveBlocks, grant: BlockGrant, changes: list[tuple[Row, int, list[BlockId]]]
    ) -> None:
        """Follows the running rows: nobody yields before a row is short, and then no more than must."""
        victims = iter(wish.victims)
        assert all(row in victims for row in wish.rows), "the rows are not in the order of the victims"
        yielding = list(grant.preempted)
        num_held = 0
        for row, num_tokens in zip(wish.rows, wish.num_tokens, strict=True):
            num_wanted = -(-num_tokens // self._block_size)
            num_own = len(self.tables.get(row, ()))
            is_short = row in self.tables and num_wanted - num_own > self.num_available
            may_sit_out = is_short and row != wish.victims[0] and num_held + num_own <= self._max_held
            assert (row in grant.held) == may_sit_out
            if may_sit_out:
                num_held += num_own
                continue
            while row in self.tables and num_wanted - len(self.tables[row]) > self.num_available and yielding:
                self.release(yielding.pop(0))
            if row not in self.tables:
                assert not yielding, f"{yielding} yielded to nobody"
                assert all(row != changed for changed, _, _ in changes)
            elif num_wanted > len(self.tables[row]):
                changed, start, blocks = changes.pop(0)
                assert (changed, start + len(blocks)) == (row, num_wanted)
                self._take(row, start, blocks)
        assert not yielding, f"{yielding} yielded to nobody"

    def _follow_admissions(
        self, wish: ReserveBlocks, grant: BlockGrant, changes: list[tuple[Row, int, list[BlockId]]]
    ) -> None:
        granted = iter(zip(grant.admitted, grant.num_cached, grant.num_chunk, strict=True))
        index_of_next, num_cached, num_chunk = next(granted, (-1, 0, 0))
        budget, num_running, has_ended = wish.budget, len(wish.victims), False
        for index, admission in enumerate(wish.admissions):
            state = self._state(admission, budget, num_running)
            if index != index_of_next:
                assert state != "fits" or has_ended or self.has_weak_keys, f"{admission} fits and is left out"
                has_ended |= state == "lacks" and not admission.may_be_passed
                continue
            assert state == "fits" or self.has_weak_keys, f"{admission} {state}"
            assert not has_ended or self.has_weak_keys, f"{admission} passed one that must not be passed"
            num_missing = admission.num_tokens - num_cached
            assert 0 < num_chunk <= min(num_missing, budget)
            assert num_chunk == num_missing or (admission.may_split and num_chunk == budget)
            self._start(admission, num_cached, num_cached + num_chunk, changes)
            budget -= num_chunk
            num_running += 1
            index_of_next, num_cached, num_chunk = next(granted, (-1, 0, 0))
        assert index_of_next == -1

    def _start(
        self,
        admission: Admission,
        num_cached: int,
        num_tokens: int,
        changes: list[tuple[Row, int, list[BlockId]]],
    ) -> None:
        """Follows one admission: what it shares has its very tokens, and what it writes is its own."""
        row, size = admission.row, self._block_size
        assert row not in self.tables
        assert num_cached % size == 0
        assert num_cached <= admission.max_cached
        num_found = num_cached // size
        assert self.has_weak_keys or num_found == len(self._known(admission))
        self._roots[row], self._computed[row] = admission.root, admission.tokens[: 4 * num_cached]
        if num_found:
            changed, start, blocks = changes.pop(0)
            assert (changed, start, len(blocks)) == (row, 0, num_found)
            for place, block in enumerate(blocks):
                served, wanted = self._prefixes[block], self._prefix(admission, place)
                assert served == wanted, f"row {row} is served {served} for {wanted}"
            self.idle = [block for block in self.idle if block not in blocks]
            self.tables[row] = blocks
            self.holders.update(blocks)
            self.num_hits += num_found
        changed, start, blocks = changes.pop(0)
        assert (changed, start, start + len(blocks)) == (row, num_found, -(-num_tokens // size))
        self._take(row, start, blocks)
        for place in range(num_found, len(admission.keys)):
            self._coming.setdefault(self._prefix(admission, place), row)

    def _take(self, row: Row, start: int, blocks: list[BlockId]) -> None:
        """Follows new blocks to a row: nobody holds them, and the free ones go first, then the oldest."""
        table = self.tables.setdefault(row, [])
        assert start == len(table)
        for block in blocks:
            assert block not in self.holders
            if block in self.idle:
                if not self.has_weak_keys:
                    assert not self.num_free
                    assert block == self.idle[0]
                self.num_evicted += 1
                self.idle.remove(block)
            self._drop(block)
            self.holders[block] = 1
            table.append(block)

    # ---- what is to be expected ----------------------------------------------------------------

    def _state(self, admission: Admission, budget: int, num_running: int) -> str:
        """Says whether an admission fits, lacks room, or waits for what another computes."""
        if budget <= 0 or num_running >= self.num_available:
            return "lacks"
        known = self._known(admission)
        if len(known) < self._most(admission) and self._prefix(admission, len(known)) in self._coming:
            return "waits"
        num_new = -(-admission.num_tokens // self._block_size) - len(known)
        num_wanted = num_new + len(set(known) & set(self.idle)) + num_running
        num_missing = admission.num_tokens - len(known) * self._block_size
        has_room = num_wanted <= self.num_available and (num_missing <= budget or admission.may_split)
        return "fits" if has_room else "lacks"

    def _known(self, admission: Admission) -> list[BlockId]:
        """Gives the blocks that it could share."""
        blocks: list[BlockId] = []
        for place in range(self._most(admission)):
            block = self._found.get(self._prefix(admission, place))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _most(self, admission: Admission) -> int:
        return min(
            len(admission.keys), min(admission.max_cached, admission.num_tokens - 1) // self._block_size
        )

    def _prefix(self, admission: Admission, place: int) -> Prefix:
        return admission.root, admission.tokens[: 4 * self._block_size * (place + 1)]

    def _let_go(self, table: list[BlockId]) -> None:
        for block in table:
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]

    def _drop(self, block: BlockId) -> None:
        prefix = self._prefixes.pop(block, None)
        if prefix is not None and self._found.get(prefix) == block:
            copies = [other for other, ends in self._prefixes.items() if ends == prefix]
            if copies:
                self._found[prefix] = copies[0]
            else:
                del self._found[prefix]


def changes_of(grant: BlockGrant) -> list[tuple[Row, int, list[BlockId]]]:
    """Gives (row, place of the first new entry, new entries) of each change, in order."""
    blocks: Iterator[BlockId] = iter(grant.blocks)
    columns = zip(grant.changed_rows, grant.changed_starts, grant.changed_counts, strict=True)
    changes = [(row, start, [next(blocks) for _ in range(count)]) for row, start, count in columns]
    assert next(blocks, None) is None
    return changes
