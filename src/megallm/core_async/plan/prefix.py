"""Which blocks hold which tokens after which others: the prefix cache's index. Pure; owns no block.

A block is known by its key, the SHA-256 of its parent's key and its token ids, so that one key
stands for the whole prefix (the chain that megatron-core's `compute_block_hashes_batched` makes).
What a key finds is served only when all tokens up to it are equal: no collision is ever served.
"""

from array import array
from hashlib import sha256

from msgspec import Struct

from megallm.core_async.messages import BlockId, FilledBlock, Ints

ROOT = bytes(32)
"""The parent's key of a first block."""


def root_of(salt: str) -> bytes:
    """Gives the parent's key of first blocks under a salt: prefixes of other salts are never shared."""
    return sha256(salt.encode()).digest() if salt else ROOT


def child_key(parent: bytes, tokens: array[int]) -> bytes:
    """Gives the key of the block that holds `tokens` after the block known as `parent`."""
    return sha256(parent + array("q", tokens).tobytes()).digest()


def extend_keys(keys: list[bytes], tokens: array[int], block_size: int, root: bytes) -> None:
    """Appends the keys of the complete blocks of `tokens` that `keys` lacks."""
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        keys.append(child_key(keys[-1] if keys else root, tokens[start : start + block_size]))


def public_hash(key: bytes) -> int:
    """Gives a key as megatron-core's results carry it: a positive int64."""
    return int.from_bytes(key[:8], "little") % (2**63 - 1) + 1


class Prefix(Struct, frozen=True, eq=False):  # gc=False: test_a_prefix_of_any_length_is_dropped crashes
    """The tokens of a block and all before them."""

    key: bytes
    above: "Prefix | bytes"
    """The prefix before the block's tokens; before a first block, the root."""
    tokens: Ints


class PrefixIndex:
    """Blocks by the prefix they end. One of them is found by its key; copies of it stand by."""

    def __init__(self, block_size: int) -> None:
        self._width = 4 * block_size
        """Bytes of one block's token ids."""
        self._blocks: dict[bytes, BlockId] = {}
        """The blocks that are found, by key."""
        self._prefixes: dict[BlockId, Prefix] = {}
        """Of those and of their copies."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: BlockId) -> bool:
        """Whether the block is one that is found."""
        prefix = self._prefixes.get(block)
        return prefix is not None and self._blocks.get(prefix.key) == block

    def find(self, keys: list[bytes], tokens: Ints, *, root: bytes, most: int) -> list[BlockId]:
        """Gives the blocks of the longest known prefix of `tokens`, `most` at the most.

        `keys`: of the complete blocks of `tokens`; the first has `root` for its parent.
        """
        found: list[BlockId] = []
        above: Prefix | bytes = root
        for place, key in enumerate(keys[:most]):
            block = self._blocks.get(key)
            if block is None:
                break
            prefix = self._prefixes[block]
            if prefix.tokens != self._slice(tokens, place) or not _is_same(prefix.above, above):
                break
            found.append(block)
            above = prefix
        return found

    def add(self, block: BlockId, filled: FilledBlock, before: BlockId | None) -> bool:
        """Makes a block known that follows the block `before`; a copy of one that is known stands by.

        False when the key is another prefix's, or `before` is not known: nothing that follows it may be.
        """
        above = filled.parent if before is None else self._prefixes.get(before)
        if above is None:
            return False
        prefix = Prefix(filled.key, above, filled.tokens)
        first = self._blocks.setdefault(filled.key, block)
        if first != block:
            known = self._prefixes[first]
            if not _is_same(known, prefix):
                return False
            prefix = known
        self._prefixes[block] = prefix
        return True

    def settle(self, block: BlockId) -> BlockId | None:
        """Gives the block that is found in the place of this one: itself, unless it is a copy of one."""
        prefix = self._prefixes.get(block)
        return None if prefix is None else self._blocks.setdefault(prefix.key, block)

    def forget(self, block: BlockId) -> None:
        """Makes a block unknown; one that is not known stays so."""
        prefix = self._prefixes.pop(block, None)
        if prefix is not None and self._blocks.get(prefix.key) == block:
            del self._blocks[prefix.key]

    def clear(self) -> None:
        """Makes all blocks unknown."""
        self._blocks.clear()
        self._prefixes.clear()

    def check(self) -> None:
        """Asserts that keys and blocks name each other."""
        odd = [
            block
            for key, block in self._blocks.items()
            if block not in self._prefixes or self._prefixes[block].key != key
        ]
        assert not odd, f"blocks {odd} are found by keys they do not have"

    def _slice(self, tokens: Ints, place: int) -> bytes:
        return tokens[place * self._width : (place + 1) * self._width]


def _is_same(one: Prefix | bytes, other: Prefix | bytes) -> bool:
    """Whether two prefixes are of the same tokens. They are one object, or soon have one above them."""
    while one is not other:
        if isinstance(one, bytes) or isinstance(other, bytes):
            return one == other
        if one.tokens != other.tokens:
            return False
        one, other = one.above, other.above
    return True
