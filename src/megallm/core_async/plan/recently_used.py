"""Blocks that nobody holds, by when they were used last. Pure.

Blocks are let go a whole table at a time, so the order is kept as a list of groups: what is done
for each block is done by the dict of its group, in one place of the memory, and the list of groups
is short.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from megallm.core_async.messages import BlockId

type Group = dict[BlockId, None]
"""The blocks of one table, the last to go first."""


class RecentlyUsed:
    """A set of blocks in order of use; adding, taking out and moving cost O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        self._groups: OrderedDict[int, Group] = OrderedDict()
        """By number, the next to go first; none is empty."""
        self._number_of: list[int] = [0] * num_blocks
        """Of the group of each block; 0 of a block that is not here."""
        self._num_groups = 0
        """Made so far."""
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __contains__(self, block: BlockId) -> bool:
        return self._number_of[block] != 0

    def __iter__(self) -> Iterator[BlockId]:
        """Goes through the blocks, the one used longest ago first."""
        for group in self._groups.values():
            yield from reversed(group)

    def present(self, blocks: list[BlockId]) -> list[BlockId]:
        """Gives those of the blocks that are here."""
        numbers = self._number_of
        return [block for block in blocks if numbers[block]]

    def add(self, blocks: Sequence[BlockId]) -> None:
        """Adds blocks that are not here as the newest, the last of them the newest of all."""
        if not blocks:
            return
        self._num_groups = number = self._num_groups + 1
        self._groups[number] = dict.fromkeys(reversed(blocks))
        numbers = self._number_of
        for block in blocks:
            numbers[block] = number
        self._num_blocks += len(blocks)

    def remove(self, blocks: Sequence[BlockId]) -> None:
        """Takes out blocks that are here."""
        numbers = self._number_of
        for block in blocks:
            number = numbers[block]
            group = self._groups[number]
            del group[block]
            numbers[block] = 0
            if not group:
                del self._groups[number]
        self._num_blocks -= len(blocks)

    def take_oldest(self, count: int) -> list[BlockId]:
        """Takes out the blocks used longest ago, the oldest first."""
        assert count <= self._num_blocks, f"{count} blocks are to be taken of {self._num_blocks}"
        taken: list[BlockId] = []
        while len(taken) < count:
            number, group = next(iter(self._groups.items()))
            missing = count - len(taken)
            if len(group) <= missing:
                taken += reversed(group)
                del self._groups[number]
            else:
                taken += [group.popitem()[0] for _ in range(missing)]
        numbers = self._number_of
        for block in taken:
            numbers[block] = 0
        self._num_blocks -= count
        return taken
