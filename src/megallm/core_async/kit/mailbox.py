"""A bounded queue with one reader: writing never waits, and no cancel loses what was written.

An anyio memory object stream gives an item to its waiting reader at once, so that a native asyncio
cancel of the reader loses it, and the asker behind it would wait for ever. Here an item stays until
it is taken. Lives in one loop.
"""

from collections import deque

import anyio


class Mailbox[T]:
    """Items that were put and not yet taken, oldest first."""

    __slots__ = ("_arrived", "_items", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._items: deque[T] = deque()
        self._arrived: anyio.Event | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def room(self) -> int:
        """How many more items it takes."""
        return self.capacity - len(self._items)

    def put(self, item: T) -> None:
        """Adds an item; the caller has looked at `room`."""
        assert len(self._items) < self.capacity, f"{len(self._items)} items, room for {self.capacity}"
        self._items.append(item)
        if self._arrived is not None:
            self._arrived.set()
            self._arrived = None

    async def wait(self) -> None:
        """Waits until there is an item; a cancel loses none."""
        while not self._items:
            self._arrived = anyio.Event()
            await self._arrived.wait()

    def take(self) -> T:
        """Gives the oldest item.

        Raises: IndexError when there is none.
        """
        return self._items.popleft()
