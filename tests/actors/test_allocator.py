"""The allocator: the pool's contract behind a mailbox, and whatever breaks it ends the engine."""

import anyio
import pytest

from megallm.core_async.actors.allocator import Allocator
from megallm.core_async.errors import ActorGone
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import (
    Admission,
    BlockCounts,
    CountBlocks,
    FilledBlocks,
    ForgetPrefixes,
    Ints,
    ListContents,
    PrefixReport,
    ReportPrefixes,
    ReserveBlocks,
    Row,
    pack_ints,
)
from megallm.core_async.plan.block_pool import BlockPool
from megallm.core_async.plan.prefix_changes import PrefixChanges
from tests.askers import Outcomes

pytestmark = pytest.mark.anyio

NOTHING = ReserveBlocks([], [], [], [], [], [], 0)


def admit(row: int, num_tokens: int) -> ReserveBlocks:
    """Asks for one admission, all of its tokens at once."""
    admission = Admission(
        row=Row(row),
        num_tokens=num_tokens,
        tokens=Ints(b""),
        keys=[],
        root=bytes(32),
        max_cached=0,
        may_split=False,
        may_be_passed=True,
    )
    return ReserveBlocks([], [], [], [], [], [admission], 1000)


async def test_it_grants_what_the_pool_grants() -> None:
    """One owner of the blocks: everybody else asks."""
    pool = BlockPool(8, 4)
    allocator = Allocator(pool)
    async with anyio.create_task_group() as tasks:
        await tasks.start(allocator.run)
        grant = await allocator.address.ask(admit(3, 9))
        assert grant.admitted == [0]
        assert grant.blocks == pool.table(Row(3))
        assert await allocator.address.ask(CountBlocks()) == BlockCounts(8, 5, 0, 3)
        released = ReserveBlocks([], [Row(3)], [], [], [], [], 0)
        assert (await allocator.address.ask(released)).num_free == 8
        pool.check()
        tasks.cancel_scope.cancel()


async def test_it_forgets_prefixes_when_told_so() -> None:
    """After a weight update nothing computed before may be found."""
    pool = BlockPool(8, 4)
    allocator = Allocator(pool)
    filled = FilledBlocks(Row(3), 0, [b"key"], bytes(32), pack_ints([1, 2, 3, 4]))
    async with anyio.create_task_group() as tasks:
        await tasks.start(allocator.run)
        await allocator.address.ask(admit(3, 5))
        await allocator.address.ask(ReserveBlocks([filled], [Row(3)], [], [], [], [], 0))
        assert await allocator.address.ask(CountBlocks()) == BlockCounts(8, 7, 1, 0)
        await allocator.address.ask(ForgetPrefixes())
        assert await allocator.address.ask(CountBlocks()) == BlockCounts(8, 8, 0, 0)
        pool.check()
        tasks.cancel_scope.cancel()


async def test_it_lists_what_rows_hold_and_prefixes_find_and_nothing_else() -> None:
    """What it leaves out is lost in a suspend; what it names needlessly is copied twice."""
    allocator = Allocator(BlockPool(8, 4))
    filled = FilledBlocks(Row(3), 0, [b"key"], bytes(32), pack_ints([1, 2, 3, 4]))
    async with anyio.create_task_group() as tasks:
        await tasks.start(allocator.run)
        assert await allocator.address.ask(ListContents()) == b""
        cached = (await allocator.address.ask(admit(3, 5))).blocks[0]
        held = (await allocator.address.ask(admit(4, 9))).blocks
        await allocator.address.ask(ReserveBlocks([filled], [Row(3)], [], [], [], [], 0))
        assert await allocator.address.ask(ListContents()) == pack_ints(sorted([cached, *held]))
        await allocator.address.ask(ForgetPrefixes())
        assert await allocator.address.ask(ListContents()) == pack_ints(sorted(held))
        tasks.cancel_scope.cancel()


async def test_it_reports_what_its_cache_holds_where_that_is_noted() -> None:
    """A router of several replicas sends a prompt to the one that has its prefix."""
    changes = PrefixChanges()
    allocator, silent = Allocator(BlockPool(8, 4, changes=changes), changes), Allocator(BlockPool(8, 4))
    filled = FilledBlocks(Row(3), 0, [b"key"], bytes(32), pack_ints([1, 2, 3, 4]))
    async with anyio.create_task_group() as tasks:
        for each in (allocator, silent):
            await tasks.start(each.run)
            await each.address.ask(admit(3, 5))
            await each.address.ask(ReserveBlocks([filled], [Row(3)], [], [], [], [], 0))
        assert await allocator.address.ask(ReportPrefixes()) == PrefixReport([b"key"], [])
        await allocator.address.ask(ForgetPrefixes())
        assert await allocator.address.ask(ReportPrefixes()) == PrefixReport([], [], is_flushed=True)
        assert await silent.address.ask(ReportPrefixes()) == PrefixReport([], [])
        tasks.cancel_scope.cancel()


async def test_a_broken_contract_ends_it_and_everybody_who_waits() -> None:
    """A scheduler that lost count must not go on with blocks that two requests write to."""
    allocator = Allocator(BlockPool(2, 4))
    outcomes = Outcomes()

    async def run() -> None:
        async with Supervisor() as supervisor:
            await supervisor.start("allocator", allocator.run)
            await anyio.sleep_forever()

    async with anyio.create_task_group() as outside:
        await outcomes.ask(outside, allocator.address, ReserveBlocks([], [], [Row(0)], [8], [], [], 0))
        await outcomes.ask(outside, allocator.address, CountBlocks())
        with pytest.raises(AssertionError, match="row 0"):
            await run()
    assert [str(error)[:16] for error in outcomes.errors] == ["allocator failed"] * 2
    with pytest.raises(ActorGone):
        await allocator.address.ask(NOTHING)
