"""The allocator: owner of the KV cache's blocks, asked once a step at most."""

from typing import ClassVar, assert_never

from megallm.core_async.kit.actor import Actor
from megallm.core_async.messages import (
    BlockCounts,
    CountBlocks,
    ForgetPrefixes,
    ListContents,
    ReportPrefixes,
    ReserveBlocks,
    pack_ints,
)
from megallm.core_async.plan.block_pool import BlockPool
from megallm.core_async.plan.prefix_changes import PrefixChanges

type AllocatorMessage = ReserveBlocks | ForgetPrefixes | CountBlocks | ListContents | ReportPrefixes


class Allocator(Actor[AllocatorMessage]):
    """Owns the block pool, and where that notes the changes of its prefixes; only it mutates them."""

    name: ClassVar[str] = "allocator"
    capacity: ClassVar[int] = 64
    """One ask of the scheduler at a time, and a few of those who look at the engine from outside."""

    def __init__(self, pool: BlockPool, changes: PrefixChanges | None = None) -> None:
        """`changes`: the pool's; without it every report is empty."""
        super().__init__()
        self._pool = pool
        self._changes = PrefixChanges() if changes is None else changes

    async def handle(self, message: AllocatorMessage) -> object:
        """See the messages."""
        match message:
            case ReserveBlocks():
                return self._pool.reserve(message)
            case ForgetPrefixes():
                self._pool.forget_prefixes()
                return None
            case ReportPrefixes():
                return self._changes.take()
            case CountBlocks():
                pool = self._pool
                return BlockCounts(pool.num_blocks, pool.num_free, pool.num_cached, pool.num_used)
            case ListContents():
                return pack_ints(self._pool.contents())
            case _:
                assert_never(message)
