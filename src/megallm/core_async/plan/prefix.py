"""Which blocks hold which tokens after which others: the prefix cache's index. Pure; owns no block.

A block is known by its key, the SHA-256 of its parent's key and its token ids, so that one key
stands for the whole prefix (the chain that megatron-core's `compute_block_hashes_batched` makes).
What a key finds is served only when all tokens up to it are equal: no collision is ever served.
"""

from array import array
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256

from megallm.core_async.messages import BlockId, FilledBlocks, Ints
from megallm.core_async.plan.prefix_changes import PrefixChanges

ROOT = bytes(32)
"""The parent's key of a first block."""
NOWHERE = -1
"""The place before the first."""


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


class Run:
    """Known blocks that follow each other; grows and shrinks at its end."""

    __slots__ = ("above", "blocks", "copies", "key", "keys", "num_below", "parent", "place", "tokens")

    def __init__(self, key: bytes, parent: bytes, above: "Run | None", place: int) -> None:
        self.key = key
        """Of its first block."""
        self.parent = parent
        """The key of the block before that, or the root."""
        self.above = above
        """The run that holds the block before its first; None where there is none before it."""
        self.place = place
        """Of that block in the run above."""
        self.blocks: list[BlockId] = []
        self.keys: list[bytes] = []
        """Of all its blocks, where changes are noted; else empty."""
        self.tokens: bytes | bytearray = b""
        """Token ids of all its blocks: what a lookup compares. As they came, until they change."""
        self.copies: dict[int, list[BlockId]] = {}
        """By place: other blocks with the same prefix, which stand by."""
        self.num_below = 0
        """Runs that begin behind one of its blocks."""

    def append(self, blocks: Sequence[BlockId], tokens: bytes) -> None:
        """Adds blocks behind the others."""
        if not self.blocks:
            self.tokens = tokens
        elif isinstance(self.tokens, bytearray):
            self.tokens += tokens
        else:
            self.tokens = bytearray(self.tokens + tokens)
        self.blocks += blocks

    def cut(self, num_left: int, num_bytes: int) -> None:
        """Takes all but the first blocks and their bytes away."""
        del self.blocks[num_left:]
        if not isinstance(self.tokens, bytearray):
            self.tokens = bytearray(self.tokens)
        del self.tokens[num_bytes:]

    def follows(self, above: "Run | None", place: int) -> bool:
        """Whether its first block comes after that very block, and not after another with its key."""
        return self.above is above and self.place == place


class PrefixIndex:
    """Blocks by the prefix they end. One of them is found, copies of it stand by.

    Blocks that follow each other are one run, which is found by the key of its first: what is done
    for a block is done for a whole run at once. A prefix is known as long as one block of it is,
    and none goes before what follows it. A run is served behind the very block it follows, and only
    as far as the tokens are equal.
    """

    def __init__(self, num_blocks: int, block_size: int, changes: PrefixChanges | None = None) -> None:
        """`changes`: told of each key that becomes known or forgotten."""
        self._changes = changes
        self._width = 4 * block_size
        """Bytes of one block's token ids."""
        self._runs: dict[bytes, Run] = {}
        """By the key of their first block; none is empty."""
        self._run_of: list[Run | None] = [None] * num_blocks
        """Of each block that is known, copies too."""
        self._place_of = [0] * num_blocks
        """Its place in the run, or that of the block it is a copy of."""
        self._is_copy: set[BlockId] = set()

    def __len__(self) -> int:
        return sum(len(run.blocks) for run in self._runs.values())

    def __contains__(self, block: BlockId) -> bool:
        """Whether the block is known."""
        return self._run_of[block] is not None

    def find(self, keys: list[bytes], tokens: Ints, *, root: bytes, most: int) -> list[BlockId]:
        """Gives the blocks of the longest known prefix of `tokens`, `most` at the most.

        `keys`: of the complete blocks of `tokens`; the first has `root` for its parent.
        """
        found: list[BlockId] = []
        most = min(most, len(keys))
        above: Run | None = None
        place = NOWHERE
        while len(found) < most:
            run = self._runs.get(keys[len(found)])
            if run is None or not run.follows(above, place) or (above is None and run.parent != root):
                break
            count = self._num_equal(run, tokens, len(found), most - len(found))
            if not count:
                break
            found += run.blocks[:count]
            above, place = run, count - 1
        return found

    def add(self, blocks: Sequence[BlockId], filled: FilledBlocks, before: BlockId | None) -> None:
        """Makes blocks known that follow the block `before`; a copy of one that is known stands by.

        One stays unknown when its key is another prefix's, or the block before it is unknown.
        """
        keys, width = filled.keys, self._width
        run = None if before is None else self._run_of[before]
        place = NOWHERE if before is None else self._place_of[before]
        if before is not None and run is None:
            return
        if run is not None and place + 1 == len(run.blocks) and not run.num_below:
            self._append(run, blocks, keys, filled.tokens)
            return
        for index, block in enumerate(blocks):
            content = filled.tokens[index * width : (index + 1) * width]
            if run is not None and self._is_at(run, place + 1, content):
                place += 1
                self._stand_by(block, run, place)
                continue
            is_last = run is not None and place + 1 == len(run.blocks)
            below = self._runs.get(keys[index])
            if below is None:
                parent = keys[index - 1] if index else filled.parent
                if run is None or not is_last:
                    run = self._begin(keys[index], parent, run, place)
                self._append(run, blocks[index:], keys[index:], filled.tokens[index * width :])
                return
            is_same = below.follows(run, place) and (run is not None or below.parent == filled.parent)
            if not is_same or not self._is_at(below, 0, content):
                return
            run, place = below, 0
            self._stand_by(block, run, place)

    def split(self, blocks: list[BlockId]) -> tuple[list[BlockId], list[BlockId]]:
        """Gives those of the blocks that are known, and the others."""
        run_of = self._run_of
        known = [block for block in blocks if run_of[block] is not None]
        if len(known) == len(blocks):
            return known, []
        return known, [block for block in blocks if run_of[block] is None]

    def has_copies_among(self, blocks: list[BlockId]) -> bool:
        """Whether some of the blocks are copies of ones that are found."""
        return bool(self._is_copy) and not self._is_copy.isdisjoint(blocks)

    def first_of(self, block: BlockId) -> BlockId | None:
        """Gives the block that is found for this one's prefix: itself, unless it is a copy of one."""
        run = self._run_of[block]
        return None if run is None else run.blocks[self._place_of[block]]

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Makes blocks unknown, none before what follows it; where one has copies, the first is found now."""
        run_of = self._run_of
        last: Run | None = None
        count, block_of_last = 0, BlockId(0)
        for block in blocks:
            run = run_of[block]
            if run is not last or (run is not None and run.copies):
                self._cut(last, count, block_of_last)
                last, count = run, 0
            if run is None:
                continue
            run_of[block] = None
            if run.copies and self._replace(block, run):
                continue
            count += 1
            block_of_last = block
        self._cut(last, count, block_of_last)

    def clear(self) -> None:
        """Makes all blocks unknown."""
        self._runs.clear()
        self._is_copy.clear()
        if self._changes is not None:
            self._changes.flush()
        self._run_of = [None] * len(self._run_of)

    def check(self) -> None:
        """Asserts that runs and blocks name each other."""
        known = {BlockId(block) for block, run in enumerate(self._run_of) if run is not None}
        named: list[BlockId] = []
        below = Counter(run.above for run in self._runs.values() if run.above is not None)
        for key, run in self._runs.items():
            assert key == run.key, f"a run is found by {key!r}, its first block has {run.key!r}"
            assert run.blocks, f"the run of {key!r} is empty"
            assert len(run.tokens) == len(run.blocks) * self._width, f"{run.tokens!r} for {run.blocks}"
            assert self._changes is None or len(run.keys) == len(run.blocks), f"{run.keys} of {run.blocks}"
            assert run.num_below == below[run], f"{below[run]} runs follow {key!r}, {run.num_below} counted"
            places = [*enumerate(run.blocks)]
            places += [(place, block) for place, copies in run.copies.items() for block in copies]
            odd = [(p, b) for p, b in places if self._run_of[b] is not run or self._place_of[b] != p]
            assert not odd, f"places and blocks {odd} of a run are not where they say"
            named += [block for _, block in places]
        assert len(named) == len(known) and known == set(named), f"{known} are known, {named} are found"
        copies = {b for run in self._runs.values() for each in run.copies.values() for b in each}
        assert copies == self._is_copy, f"copies are {copies}, noted {self._is_copy}"
        lost = [run.key for run in below if self._runs.get(run.key) is not run]
        assert not lost, f"runs {lost} are gone before what follows them"

    # ---- below ---------------------------------------------------------------------------------

    def _num_equal(self, run: Run, tokens: Ints, start: int, most: int) -> int:
        """Gives how many blocks of a run hold what `tokens` has from block `start` on."""
        count, width = min(most, len(run.blocks)), self._width
        wanted = tokens[start * width : (start + count) * width]
        if run.tokens[: count * width] == wanted:
            return count
        return bisect(range(1, count + 1), 0, key=lambda n: run.tokens[: n * width] != wanted[: n * width])

    def _is_at(self, run: Run, place: int, content: bytes) -> bool:
        return run.tokens[place * self._width : (place + 1) * self._width] == content

    def _begin(self, key: bytes, parent: bytes, above: Run | None, place: int) -> Run:
        run = self._runs[key] = Run(key, parent, above, place)
        if above is not None:
            above.num_below += 1
        return run

    def _append(self, run: Run, blocks: Sequence[BlockId], keys: Sequence[bytes], tokens: bytes) -> None:
        if self._changes is not None:
            run.keys += keys
            self._changes.know(keys)
        run_of, place_of = self._run_of, self._place_of
        for place, block in enumerate(blocks, len(run.blocks)):
            run_of[block] = run
            place_of[block] = place
        run.append(blocks, tokens)

    def _stand_by(self, block: BlockId, run: Run, place: int) -> None:
        self._run_of[block], self._place_of[block] = run, place
        run.copies.setdefault(place, []).append(block)
        self._is_copy.add(block)

    def _cut(self, run: Run | None, count: int, first: BlockId) -> None:
        """Takes the last blocks from a run, `first` the first of them."""
        if run is None or not count:
            return
        left = len(run.blocks) - count
        assert self._place_of[first] == left, f"block {first} goes before what follows it"
        if self._changes is not None:
            self._changes.forget(reversed(run.keys[left:]))
            del run.keys[left:]
        if left:
            run.cut(left, left * self._width)
            return
        assert not run.num_below, f"{run.num_below} runs follow block {first}, which goes"
        del self._runs[run.key]
        if run.above is not None:
            run.above.num_below -= 1

    def _replace(self, block: BlockId, run: Run) -> bool:
        """Forgets a copy, or a block that has one to take its place; False when there is none."""
        place = self._place_of[block]
        copies = run.copies.get(place)
        if copies is None:
            return False
        if block in self._is_copy:
            copies.remove(block)
            self._is_copy.remove(block)
        else:
            run.blocks[place] = copies.pop(0)
            self._is_copy.remove(run.blocks[place])
        if not copies:
            del run.copies[place]
        return True
