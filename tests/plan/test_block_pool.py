"""The block pool against a model of sets, and an example for each sentence of its contract."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from megallm.core_async.messages import BlockGrant, BlockId, Row
from megallm.core_async.plan.block_pool import BlockPool

NUM_BLOCKS = 12
BLOCK_SIZE = 4
NUM_ROWS = 6


def rows_of(*numbers: int) -> list[Row]:
    """Gives rows."""
    return [Row(number) for number in numbers]


def filled(*num_blocks: int) -> tuple[BlockPool, list[Row]]:
    """Gives a pool of 12 blocks of 4 tokens whose rows 0, 1, ... hold so many, and the rows."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    rows = rows_of(*range(len(num_blocks)))
    grant = pool.reserve([], rows, [count * BLOCK_SIZE for count in num_blocks], 0, [])
    assert grant.num_admitted == len(rows)
    return pool, rows


def new_blocks(grant: BlockGrant) -> dict[Row, tuple[int, list[BlockId]]]:
    """Gives for each changed row where its new entries start, and which they are."""
    blocks = iter(grant.blocks)
    columns = zip(grant.changed_rows, grant.changed_starts, grant.changed_counts, strict=True)
    changes = {row: (start, [next(blocks) for _ in range(count)]) for row, start, count in columns}
    assert next(blocks, None) is None
    return changes


class PoolAgainstSets(RuleBasedStateMachine):
    """Admissions, growth, shortages and releases in any order; the model holds a set of blocks a row."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.free = {BlockId(block) for block in range(NUM_BLOCKS)}
        self.held: dict[Row, set[BlockId]] = {}
        """In order of admission."""

    def drop(self, row: Row) -> None:
        """Takes a row out of the model."""
        self.free |= self.held.pop(row)

    def apply(self, grant: BlockGrant) -> None:
        """Follows a grant in the model: nothing is given that somebody holds, and starts are true."""
        for row, (start, blocks) in new_blocks(grant).items():
            assert set(blocks) <= self.free
            assert len(set(blocks)) == len(blocks)
            assert start == len(self.held.get(row, set()))
            self.free -= set(blocks)
            self.held.setdefault(row, set()).update(blocks)
        assert grant.num_free == len(self.free)

    @rule(row=st.integers(0, NUM_ROWS - 1).map(Row))
    def release(self, row: Row) -> None:
        """A request ends between two steps; a row that holds nothing stays as it is."""
        self.pool.release(row)
        if row in self.held:
            self.drop(row)

    @rule(
        released=st.sets(st.integers(0, NUM_ROWS - 1).map(Row)),
        growth=st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=NUM_ROWS, max_size=NUM_ROWS),
        admissions=st.lists(st.integers(1, NUM_BLOCKS * BLOCK_SIZE), max_size=NUM_ROWS),
    )
    def one_step(self, released: set[Row], growth: list[int | None], admissions: list[int]) -> None:
        """One ask of the scheduler: some rows end, some grow, some are admitted."""
        for row in released & self.held.keys():
            self.drop(row)
        victims = list(self.held)
        most = NUM_BLOCKS * BLOCK_SIZE
        wanted = {
            row: min(most, max(1, len(self.held[row]) * BLOCK_SIZE - 3 + by))
            for row, by in zip(victims, growth, strict=False)
            if by is not None
        }
        candidates = [row for row in rows_of(*range(NUM_ROWS)) if row not in self.held]
        admissions = admissions[: len(candidates)]
        rows = [*wanted, *candidates[: len(admissions)]]
        num_tokens = [*wanted.values(), *admissions]
        grant = self.pool.reserve(sorted(released), rows, num_tokens, len(wanted), victims)

        assert grant.preempted == victims[::-1][: len(grant.preempted)]
        for row in grant.preempted:
            assert row not in grant.changed_rows
            self.drop(row)
        self.apply(grant)
        for row, num in wanted.items():
            if row not in grant.preempted:
                assert len(self.held[row]) * BLOCK_SIZE >= num
        assert set(victims[:1]).isdisjoint(grant.preempted)
        assert not (grant.preempted and grant.num_admitted)
        for row, num in zip(candidates, admissions[: grant.num_admitted], strict=False):
            assert len(self.held[row]) == -(-num // BLOCK_SIZE)
        if not grant.preempted and grant.num_admitted < len(admissions):
            assert -(-admissions[grant.num_admitted] // BLOCK_SIZE) > len(self.free)

    @invariant()
    def pool_equals_model(self) -> None:
        """Every block is where the model has it, and the pool's own invariants hold."""
        self.pool.check()
        assert self.pool.num_blocks == NUM_BLOCKS
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_used == NUM_BLOCKS - len(self.free)
        for row in rows_of(*range(NUM_ROWS)):
            table = self.pool.table(row)
            assert len(table) == len(set(table))
            assert set(table) == self.held.get(row, set())


TestPoolAgainstSets = PoolAgainstSets.TestCase
TestPoolAgainstSets.settings = settings(stateful_step_count=20)


def test_a_new_pool_is_all_free() -> None:
    """Admission starts from the full cache, so the first count must be right."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    pool.check()
    assert (pool.num_blocks, pool.num_free, pool.num_used) == (NUM_BLOCKS, NUM_BLOCKS, 0)
    assert pool.table(Row(0)) == []


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (48, 12)])
def test_a_row_gets_the_blocks_that_its_tokens_fill_or_begin(num_tokens: int, num_blocks: int) -> None:
    """One block too few would write over a neighbour, one too many is lost to others."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    grant = pool.reserve([], rows_of(3), [num_tokens], 0, [])
    assert grant.num_admitted == 1
    assert grant.changed_rows == [Row(3)]
    assert grant.changed_starts == [0]
    assert grant.changed_counts == [num_blocks]
    assert grant.blocks == pool.table(Row(3))
    assert grant.num_free == NUM_BLOCKS - num_blocks


def test_a_row_that_has_room_changes_nothing() -> None:
    """Most rows of most steps stay inside their last block; the ranks need not hear of them."""
    pool, rows = filled(2, 1)
    grant = pool.reserve([], rows, [5, 4], 2, rows)
    assert grant == BlockGrant(0, [], [], [], [], [], 9)


def test_a_growing_row_keeps_its_blocks_and_gets_new_ones_behind_them() -> None:
    """The cache holds what was computed: a table only ever grows at its end."""
    pool, rows = filled(2, 1)
    before = pool.table(rows[0])
    grant = pool.reserve([], rows[:1], [4 * BLOCK_SIZE], 1, rows)
    assert new_blocks(grant) == {rows[0]: (2, pool.table(rows[0])[2:])}
    assert pool.table(rows[0])[:2] == before


def test_released_rows_give_their_blocks_to_the_same_call() -> None:
    """A request that ended must make room in the very step that learns of it, even for its own row."""
    pool, rows = filled(6, 6)
    grant = pool.reserve(rows[:1], rows[:1], [6 * BLOCK_SIZE], 0, rows[1:])
    assert grant.num_admitted == 1
    assert grant.preempted == []
    assert len(pool.table(rows[0])) == 6


def test_a_table_is_a_copy() -> None:
    """Only the pool mutates its tables."""
    pool, rows = filled(2)
    pool.table(rows[0]).clear()
    assert len(pool.table(rows[0])) == 2


def test_the_last_victim_yields_first_and_loses_everything() -> None:
    """What was admitted last has the least computed to lose."""
    pool, rows = filled(4, 4, 4)
    grant = pool.reserve([], rows[:1], [5 * BLOCK_SIZE], 1, rows)
    assert grant.preempted == [rows[2]]
    assert pool.table(rows[2]) == []
    assert len(pool.table(rows[1])) == 4
    assert grant.num_free == 3


def test_victims_yield_one_after_the_other_until_the_row_fits() -> None:
    """No more is recomputed than must be."""
    pool, rows = filled(3, 3, 3, 3)
    grant = pool.reserve([], rows[:1], [8 * BLOCK_SIZE], 1, rows)
    assert grant.preempted == [rows[3], rows[2]]
    assert len(pool.table(rows[0])) == 8
    assert len(pool.table(rows[1])) == 3
    assert grant.num_free == 1


def test_the_order_of_victims_counts_and_not_the_number_of_the_row() -> None:
    """Rows are reused, so a low number says nothing about who came first."""
    pool, rows = filled(4, 4, 4)
    order = [rows[1], rows[2], rows[0]]
    grant = pool.reserve([], [rows[2]], [5 * BLOCK_SIZE], 1, order)
    assert grant.preempted == [rows[0]]


def test_a_row_that_can_not_fit_yields_itself_and_spares_those_before_it() -> None:
    """Taking from an older request for a younger one would let two rows undo each other for ever."""
    pool, rows = filled(5, 5, 2)
    grant = pool.reserve([], [rows[1]], [8 * BLOCK_SIZE], 1, rows)
    assert grant.preempted == [rows[2], rows[1]]
    assert grant.changed_rows == []
    assert len(pool.table(rows[0])) == 5
    assert grant.num_free == 7


def test_a_row_granted_in_the_same_call_is_never_taken_from() -> None:
    """A grant that does not last until the end of the call would send a plan to blocks of others."""
    pool, rows = filled(3, 3, 3, 3)
    grant = pool.reserve([], rows[:3], [4 * BLOCK_SIZE, 4 * BLOCK_SIZE, 9 * BLOCK_SIZE], 3, rows)
    assert grant.preempted == [rows[3], rows[2]]
    assert grant.changed_rows == rows[:2]
    assert [len(pool.table(row)) for row in rows] == [4, 4, 0, 0]


def test_a_preempted_row_further_down_the_list_is_passed_over() -> None:
    """It waits for a row of its own again; blocks given to it now would belong to nobody."""
    pool, rows = filled(4, 4, 4)
    grant = pool.reserve([], rows, [5 * BLOCK_SIZE] * 3, 3, rows)
    assert grant.preempted == [rows[2]]
    assert grant.changed_rows == rows[:2]
    assert pool.table(rows[2]) == []


def test_a_victim_that_holds_nothing_yields_as_well() -> None:
    """What is preempted is a tail of the victims, without gaps: nobody overtakes in the queue."""
    pool, rows = filled(6, 6)
    empty = Row(5)
    grant = pool.reserve([], rows[:1], [7 * BLOCK_SIZE], 1, [*rows, empty])
    assert grant.preempted == [empty, rows[1]]


def test_the_first_victim_can_have_every_block() -> None:
    """Progress: whatever the load, the oldest request always gets on."""
    pool, rows = filled(1, 4, 4, 3)
    grant = pool.reserve([], rows[:1], [NUM_BLOCKS * BLOCK_SIZE], 1, rows)
    assert grant.preempted == rows[:0:-1]
    assert len(pool.table(rows[0])) == NUM_BLOCKS
    assert grant.num_free == 0


def test_an_admission_never_preempts() -> None:
    """A newcomer that takes from a running request would only be preempted by it in turn."""
    pool, rows = filled(6, 5)
    grant = pool.reserve([], rows_of(2), [2 * BLOCK_SIZE], 0, rows)
    assert grant.num_admitted == 0
    assert grant.preempted == []
    assert grant.num_free == 1


def test_the_first_admission_that_does_not_fit_ends_the_granting() -> None:
    """A short prompt that overtakes a long one, again and again, starves it."""
    pool, rows = filled(6)
    sizes = [2 * BLOCK_SIZE, 5 * BLOCK_SIZE, 1]
    grant = pool.reserve([], rows_of(1, 2, 3), sizes, 0, rows)
    assert grant.num_admitted == 1
    assert grant.changed_rows == rows_of(1)
    assert grant.num_free == 4


def test_nobody_is_admitted_by_a_call_that_preempts() -> None:
    """What yielded is the head of the queue; its blocks must not go to one who came later."""
    pool, rows = filled(4, 8)
    grant = pool.reserve([], [rows[0], Row(2)], [5 * BLOCK_SIZE, 1], 1, rows)
    assert grant.preempted == [rows[1]]
    assert grant.num_admitted == 0
    assert grant.changed_rows == rows[:1]
    assert grant.num_free == 7


def test_running_rows_come_before_admissions() -> None:
    """The last free block goes to the one whose work is under way."""
    pool, rows = filled(6, 5)
    grant = pool.reserve([], [rows[1], Row(2)], [6 * BLOCK_SIZE, 1], 1, rows)
    assert grant.num_admitted == 0
    assert grant.preempted == []
    assert grant.changed_rows == [rows[1]]


def test_a_block_used_last_is_taken_first() -> None:
    """It is the likeliest to be in the device's caches, and a table given back is taken in its order."""
    pool, rows = filled(2, 3)
    table = pool.table(rows[0])
    pool.release(rows[0])
    pool.reserve([], rows_of(4), [2 * BLOCK_SIZE], 0, [])
    assert pool.table(Row(4)) == table


@pytest.mark.parametrize(
    ("rows", "num_tokens", "num_running", "victims", "message"),
    [
        ([0], [49], 1, [0, 1], "row 0 wants 13 blocks for 49 tokens, the pool has 12"),
        ([2], [49], 0, [0, 1], "row 2 wants 13 blocks for 49 tokens, the pool has 12"),
        ([2], [0], 0, [0, 1], "row 2 wants 0 blocks for 0 tokens"),
        ([0, 1], [48, 48], 2, [1, 0], "not in the order of the victims"),
        ([0], [48], 1, [1], "not all among the victims"),
        ([0], [48], 1, [0], r"rows \[1\] hold some of the 12 and are not among the victims"),
        ([1], [4], 0, [0], "row 1 is to be admitted and holds blocks"),
        ([0, 0], [28, 28], 2, [0, 1], "row 0 would grow by 0 blocks"),
        ([0, 1], [4], 2, [0, 1], "2 rows, 1 numbers"),
    ],
)
def test_a_call_that_breaks_the_contract_fails_loudly(
    rows: list[int], num_tokens: list[int], num_running: int, victims: list[int], message: str
) -> None:
    """A scheduler that lost count must not go on with a cache that two requests write to."""
    pool, _ = filled(6, 4)
    with pytest.raises(AssertionError, match=message):
        pool.reserve([], rows_of(*rows), num_tokens, num_running, rows_of(*victims))
