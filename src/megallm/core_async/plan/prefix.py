"""Which blocks hold which tokens after which others: the prefix cache's index. Pure; owns no block.

A block is known by its key, the SHA-256 of its parent's key and its token ids, so that one key
stands for the whole prefix (the chain that megatron-core's `compute_block_hashes_batched` makes).
What a key finds is served only when all tokens up to it are equal: no collision is ever served.
"""

from array import array
from collections.abc import Iterable
from hashlib import sha256

from megallm.core_async.messages import BlockId, FilledBlock, Ints

ROOT = bytes(32)
"""The parent's key of a first block."""


def root_of(salt: str) -> bytes:
    """Gives the parent's key of first blocks under a salt: prefixes of other salts are never shared."""
    return sha256(salt.encode()).digest() if salt else ROOT


def extend_keys(keys: list[bytes], tokens: array[int], block_size: int, root: bytes) -> None:
    """Appends the keys of the complete blocks of `tokens` that `keys` lacks."""
    start, end = len(keys) * block_size, len(tokens) // block_size * block_size
    if start >= end:
        return
    wide = array("i", bytes(8 * (end - start)))
    wide[::2] = tokens[start:end]  # int64, little-endian: no id is negative
    ids, width = wide.tobytes(), 8 * block_size
    key = keys[-1] if keys else root
    for place in range(0, len(ids), width):
        key = sha256(key + ids[place : place + width]).digest()
        keys.append(key)


def public_hash(key: bytes) -> int:
    """Gives a key as megatron-core's results carry it: a positive int64."""
    return int.from_bytes(key[:8], "little") % (2**63 - 1) + 1


class PrefixIndex:
    """Blocks by the prefix they end: one of them is found by its key, copies of it stand by.

    A prefix is known as long as one block of it is, and none goes before what follows it: that a key
    and its parent's are right then means that all tokens are, whatever other prefixes have the keys.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._width = 4 * block_size
        """Bytes of one block's token ids."""
        self._blocks: dict[bytes, BlockId] = {}
        """The blocks that are found, by key."""
        self._keys: list[bytes | None] = [None] * num_blocks
        """Of those and of their copies, by block."""
        self._contents = [b""] * num_blocks
        """The parent's key and the token ids of the same, in one: what a lookup compares."""
        self._copies: dict[bytes, list[BlockId]] = {}
        self._is_copy: set[BlockId] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: BlockId) -> bool:
        """Whether the block is known."""
        return self._keys[block] is not None

    def find(self, keys: list[bytes], tokens: Ints, *, root: bytes, most: int) -> list[BlockId]:
        """Gives the blocks of the longest known prefix of `tokens`, `most` at the most.

        `keys`: of the complete blocks of `tokens`; the first has `root` for its parent.
        """
        found: list[BlockId] = []
        parent, start = root, 0
        for key in keys[:most]:
            block = self._blocks.get(key)
            end = start + self._width
            if block is None or self._contents[block] != parent + tokens[start:end]:
                break
            found.append(block)
            parent, start = key, end
        return found

    def add(self, block: BlockId, filled: FilledBlock, before: BlockId | None) -> None:
        """Makes a block known that follows the block `before`; a copy of one that is known stands by.

        It stays unknown when its key is another prefix's, or `before` is unknown.
        """
        if before is not None and self._keys[before] is None:
            return
        key, content = filled.key, filled.parent + filled.tokens
        first = self._blocks.setdefault(key, block)
        if first != block:
            if self._contents[first] != content:
                return
            self._copies.setdefault(key, []).append(block)
            self._is_copy.add(block)
        self._keys[block], self._contents[block] = key, content

    def first_of(self, block: BlockId) -> BlockId | None:
        """Gives the block that is found for this one's prefix: itself, unless it is a copy of one."""
        key = self._keys[block]
        return None if key is None else self._blocks[key] if block in self._is_copy else block

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Makes blocks unknown; where one has copies, the first of them is found from now on."""
        for block in blocks:
            key = self._keys[block]
            if key is None:
                continue
            self._keys[block], self._contents[block] = None, b""
            if key in self._copies:
                self._forget_one_of(block, key)
            else:
                del self._blocks[key]

    def clear(self) -> None:
        """Makes all blocks unknown."""
        self._blocks.clear()
        self._copies.clear()
        self._is_copy.clear()
        self._keys = [None] * len(self._keys)
        self._contents = [b""] * len(self._contents)

    def check(self) -> None:
        """Asserts that keys and blocks name each other."""
        known = [block for block, key in enumerate(self._keys) if key is not None]
        named = [(key, block) for key, block in self._blocks.items()]
        named += [(key, block) for key, blocks in self._copies.items() for block in blocks]
        odd = [block for key, block in named if self._keys[block] != key]
        assert not odd, f"blocks {odd} are found by keys they do not have"
        assert sorted(block for _, block in named) == known, f"blocks {known} are known, {named} are found"
        assert sum(map(len, self._copies.values())) == len(self._is_copy)

    def _forget_one_of(self, block: BlockId, key: bytes) -> None:
        copies = self._copies[key]
        if block in self._is_copy:
            copies.remove(block)
        else:
            block = self._blocks[key] = copies.pop(0)
        self._is_copy.remove(block)
        if not copies:
            del self._copies[key]
