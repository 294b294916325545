"""A rank that follows: it takes no requests, and ends when the leader does, however that ends."""

import pytest

from megallm.core_async.errors import EngineDeadError
from megallm.core_async.plan.phases import Phase
from tests.loops import EVERY_LOOP
from tests.ranks.in_process import running_pair

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


async def test_a_follower_that_leaves_ends_the_leader_too() -> None:
    """A step without it would never end."""
    async with running_pair() as pair:
        await pair.follower.shutdown()
        with pytest.raises(EngineDeadError, match="rank 5 is lost: its connection has ended"):
            await pair.leading.engine.wait_for_shutdown()
        assert pair.follower.phase is Phase.STOPPED
