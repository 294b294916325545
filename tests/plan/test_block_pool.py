"""The block pool under watch in any order of events, and an example for each sentence of its contract."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from megallm.core_async.messages import Admission, BlockGrant, ReserveBlocks, Row
from megallm.core_async.plan.block_pool import BlockPool
from tests.plan.batches import Batch, rows_of
from tests.plan.watched_pool import WatchedPool, changes_of

NUM_BLOCKS = 12
BLOCK_SIZE = 4
NUM_ROWS = 6
MOST_TOKENS = NUM_BLOCKS * BLOCK_SIZE


class AnyOrder(RuleBasedStateMachine):
    """Admissions, hits, growth, shortages, ends and changes of the weights, in any order.

    The watch knows what each grant must be; here stands what happens. Prompts are made of few
    different blocks, so that they have prefixes in common.
    """

    @initialize(keeps_cached=st.booleans(), max_held=st.integers(0, 6))
    def begin(self, *, keeps_cached: bool, max_held: int) -> None:
        """Makes the pool."""
        self.pool = WatchedPool(NUM_BLOCKS, BLOCK_SIZE, keeps_cached=keeps_cached, max_held=max_held)
        self.batch = Batch(self.pool, BLOCK_SIZE)
        self.max_held = max_held

    @rule(
        released=st.sets(st.integers(0, NUM_ROWS - 1), max_size=2),
        growth=st.lists(st.integers(0, 9), min_size=NUM_ROWS, max_size=NUM_ROWS),
        prompts=st.lists(
            st.tuples(st.text("ab", max_size=4), st.integers(1, 4), st.integers(0, 15)), max_size=4
        ),
        budget=st.integers(0, 40),
        token=st.sampled_from([97, 98]),
    )
    def one_step(
        self,
        released: set[int],
        growth: list[int],
        prompts: list[tuple[str, int, int]],
        budget: int,
        token: int,
    ) -> None:
        """One ask of the scheduler: some rows end, some grow, some are admitted."""
        rows = self.batch.rows
        free_rows = [row for row in rows_of(*range(NUM_ROWS)) if row not in rows or row in released]
        grow: dict[int, int] = {
            row: min(by, MOST_TOKENS - rows[row].num_computed)
            for row, by in zip(rows, growth, strict=False)
            if by and row not in released and rows[row].num_computed < MOST_TOKENS
        }
        admissions = [self.admission(row, *prompt) for row, prompt in zip(free_rows, prompts, strict=False)]
        grant = self.batch.step(*admissions, grow=grow, released=sorted(released), budget=budget, token=token)
        assert sum(len(self.pool.table(row)) for row in grant.held) <= self.max_held
        assert not grant.held or set(rows) - set(grant.held), "nobody's blocks would ever come back"

    def admission(self, row: Row, blocks: str, tail: int, flags: int) -> Admission:
        """Gives a prompt of some whole blocks and a tail."""
        tokens = [ord(letter) for letter in blocks for _ in range(BLOCK_SIZE)] + [120] * tail
        return self.batch.admission(
            row,
            tokens,
            salt="other" if flags & 1 else "",
            shares=flags & 6 != 0,
            max_cached=len(tokens) // 2 if flags & 8 and flags & 4 else None,
            may_split=bool(flags & 2),
            may_be_passed=bool(flags & 4),
        )

    @rule(row=st.integers(0, NUM_ROWS - 1))
    def wait_for_nothing(self, row: int) -> None:
        """A row ends, and nothing else happens."""
        self.batch.step(released=[row])

    @rule()
    def new_weights(self) -> None:
        """Everything known is of the old weights."""
        self.batch.forget()
        assert self.pool.num_cached == 0

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        """And as many rows hold it as the pool counts."""
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == NUM_BLOCKS

    @invariant()
    def contents_are_what_is_held_or_cached(self) -> None:
        """A suspend loses the rest."""
        if hasattr(self, "pool"):
            watch, contents = self.pool.watch, self.pool.contents()
            assert len(contents) == self.pool.num_cached + self.pool.num_used
            assert contents == sorted(set(contents))
            assert set(contents) >= set(watch.holders)
            assert watch.has_weak_keys or set(contents) == {*watch.holders, *watch.idle}


class AnyOrderWithWeakKeys(AnyOrder):
    """The same where all prefixes of one length have one key: an attacker who finds collisions at will."""

    @initialize(keeps_cached=st.booleans(), max_held=st.integers(0, 6))
    def begin(self, *, keeps_cached: bool, max_held: int) -> None:
        """Makes the pool."""
        self.pool = WatchedPool(
            NUM_BLOCKS, BLOCK_SIZE, keeps_cached=keeps_cached, max_held=max_held, has_weak_keys=True
        )
        self.batch = Batch(self.pool, BLOCK_SIZE, key_of=lambda above, tokens: bytes([above[0] + 1 & 255]))
        self.max_held = max_held


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=20)
TestAnyOrderWithWeakKeys = AnyOrderWithWeakKeys.TestCase
TestAnyOrderWithWeakKeys.settings = settings(stateful_step_count=20)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [AnyOrder, AnyOrderWithWeakKeys])
def test_the_contract_holds_over_long_runs(kind: type[AnyOrder], seed: int) -> None:
    """Faults that need many steps to come about: short examples are found by the two above."""
    random = Random(seed)
    machine = kind()
    machine.begin(keeps_cached=(is_lru := seed % 3 != 2), max_held=random.choice([0, 3, 6]))
    for _ in range(1000):
        machine.one_step(
            released={row for row in range(NUM_ROWS) if random.random() < 0.3},
            growth=[random.choice([0, 1, 1, random.randint(1, 5)]) for _ in range(NUM_ROWS)],
            prompts=[
                (
                    "".join(random.choices("ab", k=random.randint(0, 4))),
                    random.randint(1, 4),
                    random.getrandbits(4),
                )
                for _ in range(random.randint(0, 4))
            ],
            budget=random.choice([3, 12, 40]),
            token=random.choice([97, 98]),
        )
        machine.every_block_is_in_one_place()
        if random.random() < 0.01:
            machine.new_weights()
    assert machine.pool.watch.num_hits > (150 if is_lru else 30)
    assert (machine.pool.watch.num_evicted > 100) == (is_lru and kind is AnyOrder)


def filled(*num_blocks: int, max_held: int = 0) -> Batch:
    """Gives rows 0, 1, ... that have filled so many of 12 blocks, and share none."""
    batch = Batch(WatchedPool(NUM_BLOCKS, BLOCK_SIZE, max_held=max_held), BLOCK_SIZE)
    grant = batch.step(*[batch.admission(row, [1], shares=False) for row in range(len(num_blocks))])
    assert grant.admitted == list(range(len(num_blocks)))
    batch.step(grow={row: count * BLOCK_SIZE - 1 for row, count in enumerate(num_blocks)})
    assert sizes(batch) == list(num_blocks)
    return batch


def sizes(batch: Batch) -> list[int]:
    """Gives how many blocks each running row holds, in order."""
    return [len(batch.pool.table(row)) for row in batch.rows]


def test_a_new_pool_is_all_free() -> None:
    """Admission starts from the full cache, so the first count must be right."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    pool.check()
    assert (pool.num_blocks, pool.num_free, pool.num_cached, pool.num_used) == (NUM_BLOCKS, NUM_BLOCKS, 0, 0)
    assert pool.table(Row(0)) == []


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (48, 12)])
def test_a_row_gets_the_blocks_that_its_tokens_fill_or_begin(num_tokens: int, num_blocks: int) -> None:
    """One block too few would write over a neighbour, one too many is lost to others."""
    batch = Batch(BlockPool(NUM_BLOCKS, BLOCK_SIZE), BLOCK_SIZE)
    grant = batch.step(batch.admission(3, [1] * num_tokens))
    assert (grant.admitted, grant.num_cached, grant.num_chunk) == ([0], [0], [num_tokens])
    assert changes_of(grant) == [(Row(3), 0, batch.pool.table(Row(3)))]
    assert len(grant.blocks) == num_blocks
    assert (grant.num_free, grant.num_cached_blocks) == (NUM_BLOCKS - num_blocks, 0)


def test_a_row_that_has_room_changes_nothing() -> None:
    """Most rows of most steps stay inside their last block; the ranks need not hear of them."""
    batch = filled(2, 1)
    batch.step(grow={0: 1})
    assert batch.step(grow={0: 3}) == BlockGrant([], [], [], [], [], [], [], [], [], 8, 0)


def test_a_growing_row_keeps_its_blocks_and_gets_new_ones_behind_them() -> None:
    """The cache holds what was computed: a table only ever grows at its end."""
    batch = filled(2, 1)
    before = batch.pool.table(Row(0))
    grant = batch.step(grow={0: 2 * BLOCK_SIZE})
    assert changes_of(grant) == [(Row(0), 2, batch.pool.table(Row(0))[2:])]
    assert batch.pool.table(Row(0))[:2] == before
    assert sizes(batch) == [4, 1]


def test_released_rows_give_their_blocks_to_the_same_call() -> None:
    """A request that ended must make room in the very step that learns of it, even for its own row."""
    batch = filled(6, 6)
    grant = batch.step(batch.admission(0, [1] * 5 * BLOCK_SIZE), released=[0])
    assert (grant.admitted, grant.preempted) == ([0], [])
    assert len(batch.pool.table(Row(0))) == 5


def test_a_table_is_a_copy() -> None:
    """Only the pool mutates its tables."""
    batch = filled(2)
    batch.pool.table(Row(0)).clear()
    assert sizes(batch) == [2]


def test_the_last_victim_yields_first_and_loses_everything() -> None:
    """What was admitted last has the least computed to lose."""
    batch = filled(4, 4, 4)
    grant = batch.step(grow={0: 1})
    assert grant.preempted == rows_of(2)
    assert batch.pool.table(Row(2)) == []
    assert sizes(batch) == [5, 4]
    assert grant.num_free == 3


def test_victims_yield_one_after_the_other_until_the_row_fits() -> None:
    """No more is recomputed than must be."""
    batch = filled(3, 3, 3, 3)
    grant = batch.step(grow={0: 5 * BLOCK_SIZE})
    assert grant.preempted == rows_of(3, 2)
    assert sizes(batch) == [8, 3]
    assert grant.num_free == 1


def test_the_order_of_victims_counts_and_not_the_number_of_the_row() -> None:
    """Rows are reused, so a low number says nothing about who came first."""
    batch = filled(4, 4, 4)
    wish = ReserveBlocks([], [], rows_of(2), [5 * BLOCK_SIZE], rows_of(1, 2, 0), [], 0)
    assert batch.pool.reserve(wish).preempted == rows_of(0)


def test_a_row_that_can_not_fit_yields_itself_and_spares_those_before_it() -> None:
    """Taking from an older request for a younger one would let two rows undo each other for ever."""
    batch = filled(5, 5, 2)
    grant = batch.step(grow={1: 3 * BLOCK_SIZE})
    assert grant.preempted == rows_of(2, 1)
    assert grant.changed_rows == []
    assert sizes(batch) == [5]
    assert grant.num_free == 7


def test_a_row_granted_in_the_same_call_is_never_taken_from() -> None:
    """A grant that does not last until the end of the call would send a plan to blocks of others."""
    batch = filled(3, 3, 3, 3)
    grant = batch.step(grow={0: 1, 1: 1, 2: 6 * BLOCK_SIZE})
    assert grant.preempted == rows_of(3, 2)
    assert grant.changed_rows == rows_of(0, 1)
    assert sizes(batch) == [4, 4]


def test_a_preempted_row_further_down_the_list_is_passed_over() -> None:
    """It waits for a row of its own again; blocks given to it now would belong to nobody."""
    batch = filled(4, 4, 4)
    grant = batch.step(grow={0: 1, 1: 1, 2: 1})
    assert grant.preempted == rows_of(2)
    assert grant.changed_rows == rows_of(0, 1)
    assert sizes(batch) == [5, 5]


def test_the_first_victim_can_have_every_block() -> None:
    """Progress: whatever the load, the oldest request always gets on."""
    batch = filled(1, 4, 4, 3)
    grant = batch.step(grow={0: 11 * BLOCK_SIZE})
    assert grant.preempted == rows_of(3, 2, 1)
    assert sizes(batch) == [NUM_BLOCKS]
    assert grant.num_free == 0


def test_nobody_is_admitted_by_a_call_that_preempts() -> None:
    """What yielded is the head of the queue; its blocks must not go to one who came later."""
    batch = filled(4, 8)
    grant = batch.step(batch.admission(2, [1]), grow={0: 1})
    assert (grant.preempted, grant.admitted) == (rows_of(1), [])
    assert grant.num_free == 7


@pytest.mark.parametrize(
    ("rows", "num_tokens", "victims", "message"),
    [
        ([0], [49], [0, 1], "row 0 wants 13 blocks for 49 tokens, the pool has 12"),
        ([0], [0], [0, 1], "row 0 wants 0 blocks for 0 tokens"),
        ([2], [4], [0, 1, 2], "row 2 is to grow and holds no block"),
        ([0, 1], [48, 48], [1, 0], "not in the order of the victims"),
        ([0], [48], [1], "not in the order of the victims"),
        ([0], [48], [0], "row 0, the first of all, lacks 6 blocks and only 2 of 12 can be had"),
        ([0, 0], [28, 40], [0, 1], "not in the order of the victims"),
    ],
)
def test_a_call_that_breaks_the_contract_fails_loudly(
    rows: list[int], num_tokens: list[int], victims: list[int], message: str
) -> None:
    """A scheduler that lost count must not go on with a cache that two requests write to."""
    pool = filled(6, 4).pool
    with pytest.raises(AssertionError, match=message):
        pool.reserve(ReserveBlocks([], [], rows_of(*rows), num_tokens, rows_of(*victims), [], 0))


def test_columns_of_different_lengths_are_refused() -> None:
    """A row without a number would be given another's."""
    with pytest.raises(ValueError, match="zip"):
        filled(1, 1).pool.reserve(ReserveBlocks([], [], rows_of(0, 1), [4], rows_of(0, 1), [], 0))


def test_a_row_that_holds_blocks_is_not_admitted() -> None:
    """Two requests at one row would write to one table."""
    batch = filled(2)
    with pytest.raises(AssertionError, match="row 0 is to be admitted and holds"):
        batch.step(batch.admission(0, [1]))
