"""The allocator: owner of the KV cache's blocks, asked once a step at most."""

from typing import ClassVar, assert_never

from megallm.core_async.kit.actor import Actor
from megallm.core_async.messages import BlockCounts, CountBlocks, ForgetPrefixes, ReserveBlocks
from megallm.core_async.plan.block_pool import BlockPool


class Allocator(Actor[ReserveBlocks | ForgetPrefixes | CountBlocks]):
    """Owns the block pool; only it mutates it."""

    name: ClassVar[str] = "allocator"
    capacity: ClassVar[int] = 64
    """One ask of the scheduler at a time, and a few of those who look at the engine from outside."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__()
        self._pool = pool

    async def handle(self, message: ReserveBlocks | ForgetPrefixes | CountBlocks) -> object:
        """See the messages."""
        match message:
            case ReserveBlocks():
                return self._pool.reserve(message)
            case ForgetPrefixes():
                self._pool.forget_prefixes()
                return None
            case CountBlocks():
                pool = self._pool
                return BlockCounts(pool.num_blocks, pool.num_free, pool.num_cached, pool.num_used)
            case _:
                assert_never(message)
