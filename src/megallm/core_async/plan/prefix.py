"""Which blocks hold which tokens after which others: the prefix cache's index. Pure; owns no block.

A block is known by its key, the SHA-256 of its parent's key and its token ids, so that one key
stands for the whole prefix (the chain that megatron-core's `compute_block_hashes_batched` makes).
What a key finds is served only when parent and tokens are equal: no collision is ever served.
"""

from array import array
from hashlib import sha256

from megallm.core_async.messages import BlockId, Ints

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


class PrefixIndex:
    """Blocks by key, and keys of blocks."""

    def __init__(self, block_size: int) -> None:
        self._width = 4 * block_size
        """Bytes of one block's token ids."""
        self._blocks: dict[bytes, BlockId] = {}
        self._entries: dict[BlockId, tuple[bytes, bytes, Ints]] = {}
        """(key, parent's key, token ids) of each known block."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._entries

    def find(self, keys: list[bytes], tokens: Ints, *, root: bytes, most: int) -> list[BlockId]:
        """Gives the blocks of the longest known prefix of `tokens`, `most` at the most.

        `keys`: of the complete blocks of `tokens`; the first has `root` for its parent.
        """
        found: list[BlockId] = []
        parent = root
        for place, key in enumerate(keys[:most]):
            block = self._blocks.get(key)
            if block is None or not self._stands_for(block, parent, self._slice(tokens, place)):
                break
            found.append(block)
            parent = key
        return found

    def add(self, block: BlockId, key: bytes, parent: bytes, tokens: Ints) -> bool:
        """Makes a block known; says whether its key stands for this prefix now.

        False when another prefix has the key: nothing that follows the block may be made known.
        """
        known = self._blocks.get(key)
        if known is not None:
            return self._stands_for(known, parent, tokens)
        self._blocks[key] = block
        self._entries[block] = (key, parent, tokens)
        return True

    def forget(self, block: BlockId) -> None:
        """Makes a block unknown; one that is not known stays so."""
        entry = self._entries.pop(block, None)
        if entry is not None:
            del self._blocks[entry[0]]

    def clear(self) -> None:
        """Makes all blocks unknown."""
        self._blocks.clear()
        self._entries.clear()

    def check(self) -> None:
        """Asserts that keys and blocks name each other."""
        odd = [block for key, block in self._blocks.items() if self._entries.get(block, (b"",))[0] != key]
        assert not odd, f"blocks {odd} are found by keys they do not have"
        assert len(self._blocks) == len(self._entries), (
            f"{len(self._blocks)} keys, {len(self._entries)} blocks"
        )

    def _stands_for(self, block: BlockId, parent: bytes, tokens: bytes) -> bool:
        _, known_parent, known_tokens = self._entries[block]
        return known_parent == parent and known_tokens == tokens

    def _slice(self, tokens: Ints, place: int) -> bytes:
        return tokens[place * self._width : (place + 1) * self._width]
