"""Who waits to be admitted, and in which order: by priority, and first come first served within one. Pure."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from megallm.core_async.plan.request import Request


class WaitingLine:
    """Waiting requests. Adding, putting back and leaving cost O(1) each, wherever a request stands."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[Request, None]] = {}
        """By priority; none is empty."""
        self._priorities: list[int] = []
        """Of the queues, ascending."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Goes through those that wait, the next to be admitted first."""
        for priority in self._priorities:
            yield from self._queues[priority]

    def append(self, request: Request) -> None:
        """Adds a request behind all of its priority."""
        self._enter(request)

    def put_back(self, request: Request) -> None:
        """Adds one that was running before all of its priority: it came before them."""
        self._enter(request).move_to_end(request, last=False)

    def leave(self, request: Request) -> None:
        """Takes out a request, wherever it stands: it was admitted, or has ended."""
        assert request.is_waiting, f"request {request.request_id} does not wait"
        request.is_waiting = False
        self._num_waiting -= 1
        queue = self._queues[request.priority]
        del queue[request]
        if not queue:
            del self._queues[request.priority]
            del self._priorities[bisect_left(self._priorities, request.priority)]

    def _enter(self, request: Request) -> OrderedDict[Request, None]:
        assert not request.is_waiting, f"request {request.request_id} waits already"
        request.is_waiting = True
        self._num_waiting += 1
        queue = self._queues.get(request.priority)
        if queue is None:
            queue = self._queues[request.priority] = OrderedDict()
            insort(self._priorities, request.priority)
        queue[request] = None
        return queue
