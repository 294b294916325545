"""Which front end a request belongs to: its id says so. Splits a step's output by owner.

Owner 0 is the engine's own process. Knows no socket: what carries a part to its owner is a `Route`.
"""

from array import array
from collections.abc import Callable, Sequence
from itertools import count
from operator import itemgetter
from typing import Final, Protocol

from msgspec import structs

from megallm.core_async.messages import (
    Floats,
    Ints,
    RequestId,
    TokenBatch,
    TopLogProbs,
    unpack_floats,
    unpack_ints,
)

OWNER_SHIFT: Final = 40
"""Bits of a request id below its owner: a million million requests for each front end."""
OWN: Final = 0
NUM_SILENT: Final = 32
"""Steps without a token for a front end after which it is told the engine's figures all the same."""


def owner_of(request_id: int) -> int:
    """Gives the owner of a request."""
    return request_id >> OWNER_SHIFT


def request_ids(owner: int) -> Callable[[], RequestId]:
    """Gives what makes the request ids of an owner; callable from any thread."""
    numbers = count((owner << OWNER_SHIFT) + 1)
    return lambda: RequestId(next(numbers))


class Route(Protocol):
    """One owner's way out of the engine. Called in the engine's loop; neither waits nor raises."""

    def put(self, batch: TokenBatch) -> None:
        """Takes what a step gave for the owner's requests."""
        ...

    def note(self) -> None:
        """The engine's figures or its phase have changed."""
        ...

    def abort(self, request_id: str | None) -> None:
        """The HTTP requests of an id, or all, are to end."""
        ...


class Routes:
    """The front ends of an engine. Owned by its loop."""

    def __init__(self) -> None:
        self._routes: dict[int, Route] = {}
        self._num_silent: dict[int, int] = {}
        """Steps since each owner was told of one."""
        self._owners = count(1)
        self._has_routed = False
        """Whether there was ever one; else nothing is looked at."""
        self._requests: list[RequestId] = []
        """Those of the last batch, and whose place each is in: most steps have the rows of the one before."""
        self._places: dict[int, list[int]] = {}

    def new_owner(self) -> int:
        """Gives a number that no other front end of this engine has had."""
        return next(self._owners)

    def attach(self, owner: int, route: Route) -> None:
        """Lets an owner's output go its route from now on."""
        self._has_routed = True
        self._routes[owner] = route
        self._num_silent[owner] = 0

    def detach(self, owner: int) -> None:
        """Drops what comes for an owner from now on."""
        self._routes.pop(owner, None)
        self._num_silent.pop(owner, None)

    def note(self) -> None:
        """Tells every front end that the figures or the phase have changed."""
        for owner, route in self._routes.items():
            self._num_silent[owner] = 0
            route.note()

    def abort_elsewhere(self, request_id: str | None, owner: int) -> None:
        """Has every front end but `owner` end its HTTP requests of an id, or all."""
        for other, route in self._routes.items():
            if other != owner:
                route.abort(request_id)

    def split(self, batch: TokenBatch) -> TokenBatch:
        """Sends each owner its part of a step's output, and gives the engine's own."""
        if not self._has_routed:
            return batch
        if batch.requests != self._requests:
            self._requests = batch.requests
            self._places = _places_by_owner(batch.requests)
        owners = {
            *self._places,
            *(owner_of(spec.request_id) for spec in batch.started),
            *(owner_of(finished.request_id) for finished in batch.finished),
            *(owner_of(chunk.request_id) for chunk in batch.scored),
        }
        for owner, route in self._routes.items():
            if owner in owners:
                self._num_silent[owner] = 0
                route.put(self._part(batch, owner, owners))
                continue
            self._num_silent[owner] += 1
            if self._num_silent[owner] >= NUM_SILENT:
                self._num_silent[owner] = 0
                route.note()
        return self._part(batch, OWN, owners)

    def _part(self, batch: TokenBatch, owner: int, owners: set[int]) -> TokenBatch:
        if owners <= {owner}:
            return batch
        places = self._places.get(owner, [])
        return TokenBatch(
            started=[spec for spec in batch.started if owner_of(spec.request_id) == owner],
            requests=[batch.requests[place] for place in places],
            tokens=_ints_at(batch.tokens, places),
            log_probs=_floats_at(batch.log_probs, places) if batch.log_probs else batch.log_probs,
            finished=[each for each in batch.finished if owner_of(each.request_id) == owner],
            time_s=batch.time_s,
            top=None if batch.top is None else _top_at(batch.top, places),
            scored=[chunk for chunk in batch.scored if owner_of(chunk.request_id) == owner],
        )


def shifted(batch: TokenBatch, by_s: float) -> TokenBatch:
    """Gives a batch whose times are those of another clock, `by_s` ahead."""

    def moved(events: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
        return tuple((what, time_s + by_s) for what, time_s in events)

    return structs.replace(
        batch,
        time_s=batch.time_s + by_s,
        started=[structs.replace(each, events=moved(each.events)) for each in batch.started],
        finished=[structs.replace(each, events=moved(each.events)) for each in batch.finished],
    )


def _places_by_owner(requests: list[RequestId]) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for place, request_id in enumerate(requests):
        places.setdefault(request_id >> OWNER_SHIFT, []).append(place)
    return places


def _ints_at(column: Ints, places: Sequence[int]) -> Ints:
    return Ints(_picked(unpack_ints(column), places).tobytes())


def _floats_at(column: Floats, places: Sequence[int]) -> Floats:
    return Floats(_picked(unpack_floats(column), places).tobytes())


def _top_at(top: TopLogProbs, places: Sequence[int]) -> TopLogProbs:
    width = top.num_top
    cells = [cell for place in places for cell in range(place * width, (place + 1) * width)]
    return TopLogProbs(width, _ints_at(top.ids, cells), _floats_at(top.log_probs, cells))


def _picked[T: (int, float)](values: array[T], places: Sequence[int]) -> array[T]:
    if len(places) > 1:
        return array(values.typecode, itemgetter(*places)(values))
    return array(values.typecode, [values[place] for place in places])
