"""The router: the routing table behind a mailbox."""

import anyio
import pytest

from megallm.core_async.actors.router import Router
from megallm.core_async.errors import EngineDeadError
from megallm.core_async.messages import (
    DropRank,
    PrefixesChanged,
    PrefixReport,
    RankJoined,
    RequestId,
    RequestsEnded,
    RouteRequests,
)
from megallm.core_async.plan.routing import RoutingPolicy, RoutingTable

pytestmark = pytest.mark.anyio


def wish(first: int, *keys: list[bytes]) -> RouteRequests:
    """Asks for the ranks of one submission; ids count up."""
    return RouteRequests([RequestId(first + place) for place in range(len(keys))], list(keys))


async def test_a_submission_is_routed_by_one_message_and_ends_are_counted() -> None:
    """Messages are counted by submissions and steps, never by requests."""
    table = RoutingTable(2, policy=RoutingPolicy.LONGEST_PREFIX, alpha=0.5, max_requests=4)
    router = Router(table)
    async with anyio.create_task_group() as tasks:
        await tasks.start(router.run)
        assert await router.address.ask(wish(1, [b"a"], [b"b"], [b"a", b"ac"])) == [0, 1, 0]
        router.address.tell(RequestsEnded([RequestId(1), RequestId(3)]))
        assert await router.address.ask(wish(4, [])) == [0]
        router.address.tell(PrefixesChanged(1, PrefixReport([], [], is_flushed=True)))
        assert await router.address.ask(wish(5, [b"b"])) == [0]
        tasks.cancel_scope.cancel()
    assert (table.num_pending(0), table.num_pending(1)) == (2, 1)


async def test_what_a_rank_reports_of_its_cache_counts_for_the_next_request() -> None:
    """And the word of a rank that is gone comes too late, and breaks nothing."""
    router = Router(RoutingTable(2, policy=RoutingPolicy.LONGEST_PREFIX, alpha=0.8, max_requests=4))
    async with anyio.create_task_group() as tasks:
        await tasks.start(router.run)
        assert await router.address.ask(wish(1, [b"a"], [b"b"], [b"a"])) == [0, 1, 0]
        router.address.tell(PrefixesChanged(0, PrefixReport([], [b"a"])))
        assert await router.address.ask(wish(4, [b"a"])) == [1]
        router.address.tell(PrefixesChanged(0, PrefixReport([b"a"], [])))
        assert await router.address.ask(DropRank(0)) == [1, 3]
        router.address.tell(PrefixesChanged(0, PrefixReport([b"b"], [b"a"], is_flushed=True)))
        assert await router.address.ask(wish(5, [b"a"], [b"c"])) == [1, 1]
        tasks.cancel_scope.cancel()


async def test_a_router_without_ranks_refuses_and_goes_on_when_one_comes() -> None:
    """A caller must not wait for a rank that may never come."""
    router = Router(RoutingTable(1, policy=RoutingPolicy.LOAD_BALANCED, alpha=0.5, max_requests=4))
    async with anyio.create_task_group() as tasks:
        await tasks.start(router.run)
        assert await router.address.ask(wish(1, [], [])) == [0, 0]
        assert await router.address.ask(DropRank(0)) == [1, 2]
        with pytest.raises(EngineDeadError, match="no data-parallel rank is left"):
            await router.address.ask(wish(3, []))
        router.address.tell(RankJoined(0))
        assert await router.address.ask(wish(3, [])) == [0]
        tasks.cancel_scope.cancel()
