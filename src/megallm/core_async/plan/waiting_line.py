"""Who waits to be admitted, and in which order: by priority, and first come first served within one. Pure."""

from collections import deque
from collections.abc import Iterator

from megallm.core_async.plan.request import Request


class WaitingLine:
    """Waiting requests. Adding, putting back and leaving cost O(1) each, over the life of a request.

    A request that leaves from the middle keeps its place in the queue, void, until the head passes it.
    """

    def __init__(self) -> None:
        self._queues: dict[int, deque[tuple[int, Request]]] = {}
        """By priority: (ticket, request); void unless it is the request's ticket of now."""
        self._num_waiting = 0
        self._num_tickets = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Goes through those that wait, the next to be admitted first."""
        for priority in sorted(self._queues):
            for ticket, request in self._queues[priority]:
                if request.ticket == ticket:
                    yield request

    def append(self, request: Request) -> None:
        """Adds a request behind all of its priority."""
        ticket = self._admitted_to_line(request)
        self._queues.setdefault(request.priority, deque()).append((ticket, request))

    def put_back(self, request: Request) -> None:
        """Adds one that was running before all of its priority: it came before them."""
        ticket = self._admitted_to_line(request)
        self._queues.setdefault(request.priority, deque()).appendleft((ticket, request))

    def leave(self, request: Request) -> None:
        """Takes out a request, wherever it stands: it was admitted, or has ended."""
        assert request.ticket, f"request {request.request_id} does not wait"
        request.ticket = 0
        self._num_waiting -= 1
        queue = self._queues[request.priority]
        while queue and queue[0][1].ticket != queue[0][0]:
            queue.popleft()
        if not queue:
            del self._queues[request.priority]

    def _admitted_to_line(self, request: Request) -> int:
        assert not request.ticket, f"request {request.request_id} waits already"
        self._num_waiting += 1
        self._num_tickets += 1
        request.ticket = self._num_tickets
        return request.ticket
