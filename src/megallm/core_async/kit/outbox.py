"""Outboxes: how results reach readers that may be slow, or gone.

One writer, one reader. The writer never waits and never fails; what a slow reader has not taken
piles up and is handed over at once. A reader leaves by `close`, which is synchronous, so that it
works in any cleanup, cancelled or not.
"""

from collections.abc import Callable, Sequence

from megallm.core_async.kit.quick_event import QuickEvent, event_maker


class Outbox[T]:
    """What one reader has yet to take, of the keys it reads."""

    __slots__ = ("_is_closed", "_items", "_make_error", "_make_event", "_on_close", "_waiter", "keys")

    def __init__(self, keys: Sequence[int], on_close: "Callable[[Outbox[T]], None]") -> None:
        self.keys = tuple(keys)
        self._items: list[T] = []
        self._make_error: Callable[[], Exception] | None = None
        self._make_event: Callable[[], QuickEvent] | None = None
        """Of the reader's loop, once it has waited."""
        self._waiter: QuickEvent | None = None
        self._is_closed = False
        self._on_close = on_close

    @property
    def is_closed(self) -> bool:
        """Whether the reader has left."""
        return self._is_closed

    def put(self, item: T) -> None:
        """Adds an item. The writer's end; never waits."""
        if not self._is_closed:
            self._items.append(item)
            self._wake()

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """Ends the outbox: once the items are taken, each `take` raises an error that `make_error` gives."""
        if self._make_error is None:
            self._make_error = make_error
            self._wake()

    async def take(self) -> list[T]:
        """Waits until something is there and gives all of it, oldest first.

        A cancel loses nothing: the items stay for the next `take`.
        Raises: the writer's error, once all items are taken. AssertionError when the reader has left.
        """
        while not self._items:
            if self._make_error is not None:
                raise self._make_error()
            assert not self._is_closed, f"the reader of {self.keys} has left, nothing more comes"
            if self._make_event is None:
                self._make_event = event_maker()
            self._waiter = self._make_event()
            await self._waiter.wait()
        items, self._items = self._items, []
        return items

    def take_nowait(self) -> list[T]:
        """Gives all that is there, perhaps nothing."""
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Leaves: the writer is told once, and drops what comes for these keys. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._items.clear()
            self._wake()
            self._on_close(self)

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.set()
            self._waiter = None


class Outboxes[T]:
    """All open outboxes of an engine, by key; and the keys whose readers have left since last asked."""

    def __init__(self, on_closed: Callable[[], None]) -> None:
        self._by_key: dict[int, Outbox[T]] = {}
        self._closed: list[int] = []
        self._on_closed = on_closed
        self._make_error: Callable[[], Exception] | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def open(self, keys: Sequence[int]) -> Outbox[T]:
        """Makes the outbox that gets what is written for `keys`.

        Raises: the error of `fail_all`, if that was called.
        """
        if self._make_error is not None:
            raise self._make_error()
        outbox = Outbox[T](keys, self._reader_left)
        self._by_key.update(dict.fromkeys(keys, outbox))
        return outbox

    def find(self, key: int) -> Outbox[T] | None:
        """Gives the outbox that reads `key`, or None when its reader has left or it has ended."""
        return self._by_key.get(key)

    def end(self, key: int) -> None:
        """Forgets a key: nothing more will be written for it."""
        self._by_key.pop(key, None)

    def end_early(self, key: int) -> None:
        """Forgets a key whose producer does not know yet that it has ended, and reports it as closed."""
        if self._by_key.pop(key, None) is not None:
            self._closed.append(key)
            self._on_closed()

    def report_closed(self, keys: Sequence[int]) -> None:
        """Reports keys that are read elsewhere as closed."""
        self._closed.extend(keys)
        self._on_closed()

    def take_closed(self) -> list[int]:
        """Gives the keys closed since the last call, each once."""
        closed, self._closed = self._closed, []
        return closed

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """Fails every open outbox, and every one opened later, each with an error of its own."""
        self._make_error = make_error
        for outbox in dict.fromkeys(self._by_key.values()):
            outbox.fail(make_error)
        self._by_key.clear()

    def _reader_left(self, outbox: Outbox[T]) -> None:
        left = [key for key in outbox.keys if self._by_key.pop(key, None) is not None]
        if left:
            self._closed.extend(left)
            self._on_closed()
