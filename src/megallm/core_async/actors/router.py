"""The router: owner of what went to which data-parallel rank. Says where each new request goes.

Knows ids and the keys of prompts' blocks; neither the ranks' engines nor how they are reached.
"""

from typing import ClassVar, assert_never

from megallm.core_async.errors import EngineBusy, EngineDeadError
from megallm.core_async.kit.actor import Actor, Refusal
from megallm.core_async.messages import (
    DropRank,
    PrefixesChanged,
    RankJoined,
    RequestsEnded,
    RouteRequests,
)
from megallm.core_async.plan.routing import RoutingTable

type RouterMessage = RouteRequests | RequestsEnded | DropRank | RankJoined | PrefixesChanged


class Router(Actor[RouterMessage]):
    """Owns the routing table; only it mutates it. One message a submission, and one a step of a rank."""

    name: ClassVar[str] = "router"
    capacity: ClassVar[int] = 4096
    """Submissions of one turn of the loop, and a step of each rank."""

    def __init__(self, table: RoutingTable, *, max_pending: int | None = None) -> None:
        """`max_pending`: requests at each rank, on average, before more are refused; None: no limit."""
        super().__init__()
        self._table = table
        self._max_pending = max_pending

    async def handle(self, message: RouterMessage) -> object:
        """See the messages."""
        match message:
            case RouteRequests(request_ids, keys, beside):
                if not self._table.ranks:
                    raise Refusal(EngineDeadError("no data-parallel rank is left; start the engine again"))
                self._check_room(len(request_ids))
                columns = zip(request_ids, keys, beside or (None,) * len(keys), strict=True)
                return [self._table.route(*each) for each in columns]
            case RequestsEnded(request_ids):
                for request_id in request_ids:
                    self._table.end(request_id)
            case DropRank(rank):
                return self._table.lose(rank)
            case RankJoined(rank):
                self._table.add(rank)
            case PrefixesChanged(rank, report):
                self._table.correct(rank, report)
            case _:
                assert_never(message)
        return None

    def _check_room(self, num_requests: int) -> None:
        if self._max_pending is None:
            return
        ranks = self._table.ranks
        num_pending, most = sum(map(self._table.num_pending, ranks)), self._max_pending * len(ranks)
        if num_pending + num_requests > most:
            what = f"{num_requests:,} requests came, {num_pending:,} run or wait, the limit is {most:,}"
            raise Refusal(EngineBusy(f"{what}; try again later"))
