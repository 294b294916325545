"""How often each of many streams is written to: a write costs the same, however many tokens it carries.

A few streams get every token when it is there. Of many, each is given what it has once an interval
has passed since it was given something, so that all of them together are given something
`MAX_GIVEN_PER_S` times a second at most, whatever the speed of the steps. Pure: it is told the time.
"""

from collections.abc import Iterable
from math import inf
from typing import Final

from megallm.core_async.messages import RequestId

MAX_GIVEN_PER_S: Final = 6_000
"""A fifth of a core, at the 30 us that one write of a front end was measured to take."""
MAX_INTERVAL_S: Final = 0.045
"""Text that comes in more than twenty parts a second still flows."""
MIN_STREAMS: Final = 64
"""Streams below which none waits."""


class Pace:
    """The streams that may be given several tokens at once, and those that have some to be given.

    The first of a stream and the last never wait. Any other waits for the first step that is an interval
    behind the last time its stream was given something; if none comes, `take_late` and `take_all` end that.
    """

    def __init__(self) -> None:
        self.time_s = 0.0
        """When the last step was, which whoever has the steps sets: one time for all that come together."""
        self.interval_s = 0.0
        """From one time that a stream is given something to the next, at least."""
        self._given_s: dict[RequestId, float] = {}
        self._waiting: dict[RequestId, float] = {}
        """Since when, the longest first."""

    @property
    def has_waiting(self) -> bool:
        """Whether something is to be given later."""
        return bool(self._waiting)

    def begin(self, request_id: RequestId) -> None:
        """Adds a stream."""
        self._given_s[request_id] = -inf
        self._set_interval()

    def end(self, request_id: RequestId) -> None:
        """Forgets a stream; one that is not known is none."""
        if self._given_s.pop(request_id, None) is not None:
            self._waiting.pop(request_id, None)
            self._set_interval()

    def defers(self, request_id: RequestId) -> bool:
        """Says whether what a stream has now is to wait; otherwise it counts as given."""
        if not self.interval_s or request_id not in self._given_s:
            return False
        if self.time_s - self._given_s[request_id] < self.interval_s:
            self._waiting.setdefault(request_id, self.time_s)
            return True
        self._waiting.pop(request_id, None)
        self._given_s[request_id] = self.time_s
        return False

    def take_late(self) -> Iterable[RequestId]:
        """Gives the streams that have waited for the interval, their steps having failed to come."""
        late: list[RequestId] = []
        for request_id, since_s in self._waiting.items():
            if self.time_s - since_s < self.interval_s:
                break
            late.append(request_id)
        for request_id in late:
            del self._waiting[request_id]
            self._given_s[request_id] = self.time_s
        return late

    def take_all(self) -> Iterable[RequestId]:
        """Gives the streams that wait."""
        waiting, self._waiting = self._waiting, {}
        self._given_s |= dict.fromkeys(waiting, self.time_s)
        return waiting

    def _set_interval(self) -> None:
        num_streams = len(self._given_s)
        is_many = num_streams >= MIN_STREAMS
        self.interval_s = min(num_streams / MAX_GIVEN_PER_S, MAX_INTERVAL_S) if is_many else 0.0
