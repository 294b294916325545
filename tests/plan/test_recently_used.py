"""Blocks by last use: in any order of events as a plain list would have it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from megallm.core_async.messages import BlockId
from megallm.core_async.plan.recently_used import RecentlyUsed

NUM_BLOCKS = 9

block_lists = st.lists(st.integers(0, NUM_BLOCKS - 1).map(BlockId), unique=True, max_size=5)


class AnyOrder(RuleBasedStateMachine):
    """Adds, removals and evictions, beside a list that does the same."""

    def __init__(self) -> None:
        super().__init__()
        self.used = RecentlyUsed(NUM_BLOCKS)
        self.expected: list[BlockId] = []

    @rule(blocks=block_lists)
    def let_go(self, blocks: list[BlockId]) -> None:
        """A table comes, its last block first."""
        new = [block for block in blocks if block not in self.expected]
        self.used.add(new)
        self.expected += new

    @rule(blocks=block_lists)
    def hit(self, blocks: list[BlockId]) -> None:
        """Some of them are taken, wherever they stand."""
        here = [block for block in blocks if block in self.expected]
        assert self.used.present(blocks) == here
        self.used.remove(here)
        self.expected = [block for block in self.expected if block not in here]

    @rule(count=st.integers(0, NUM_BLOCKS))
    def evict(self, count: int) -> None:
        """The oldest go, across groups."""
        count = min(count, len(self.expected))
        assert self.used.take_oldest(count) == self.expected[:count]
        del self.expected[:count]

    @invariant()
    def both_say_the_same(self) -> None:
        """Order, number and membership."""
        assert list(self.used) == self.expected
        assert len(self.used) == len(self.expected)
        assert [BlockId(b) in self.used for b in range(NUM_BLOCKS)] == [
            b in self.expected for b in range(NUM_BLOCKS)
        ]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=20)


def test_no_more_is_taken_than_is_there() -> None:
    """Who counts wrong must not get a block twice."""
    used = RecentlyUsed(4)
    used.add([BlockId(1)])
    with pytest.raises(AssertionError, match="2 blocks are to be taken of 1"):
        used.take_oldest(2)


def test_groups_that_are_used_up_leave_nothing_behind() -> None:
    """A prefix that is hit a million times must not leave a million empty groups."""
    used = RecentlyUsed(4)
    for _ in range(1000):
        used.add([BlockId(1), BlockId(0)])
        used.remove([BlockId(0), BlockId(1)])
    assert not used._groups  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
