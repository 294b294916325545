"""Keys of prefixes, and the index that finds blocks by them."""

from array import array
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.messages import BlockId, FilledBlock, Row, pack_ints
from megallm.core_async.plan.prefix import ROOT, PrefixIndex, extend_keys, public_hash, root_of

BLOCK_SIZE = 2
NUM_BLOCKS = 10
type Tokens = tuple[int, ...]

token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def keys_of(tokens: Tokens | list[int], root: bytes = ROOT) -> list[bytes]:
    """Gives the keys of the complete blocks."""
    keys: list[bytes] = []
    extend_keys(keys, array("i", tokens), BLOCK_SIZE, root)
    return keys


def index_of(*prompts: Tokens, root: bytes = ROOT) -> PrefixIndex:
    """Gives an index of the complete blocks of prompts; blocks count up from 0."""
    index = PrefixIndex(NUM_BLOCKS, BLOCK_SIZE)
    number = 0
    for prompt in prompts:
        before = None
        for place, key in enumerate(keys_of(prompt, root)):
            index.add(BlockId(number), filled(place, prompt, key, root), before)
            before = BlockId(number)
            number += 1
    index.check()
    return index


def filled(place: int, prompt: Tokens, key: bytes, root: bytes = ROOT) -> FilledBlock:
    """Gives what the index is told of a block of a prompt."""
    keys = keys_of(prompt, root)
    tokens = pack_ints(prompt[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE])
    return FilledBlock(Row(0), place, key, keys[place - 1] if place else root, tokens)


def found(index: PrefixIndex, prompt: Tokens, *, most: int = 99, root: bytes = ROOT) -> list[int]:
    """Gives the blocks that a prompt finds."""
    return list(index.find(keys_of(prompt, root), pack_ints(prompt), root=root, most=most))


# ---- keys ----------------------------------------------------------------------------------------


@given(tokens=token_lists)
def test_keys_are_the_chain_that_megatron_core_makes(tokens: list[int]) -> None:
    """Routers of other engines and ours agree on them: SHA-256 over the parent's key and int64 ids."""
    keys: list[bytes] = []
    parent = bytes(32)
    for start in range(0, len(tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
        ids = b"".join(token.to_bytes(8, "little") for token in tokens[start : start + BLOCK_SIZE])
        parent = sha256(parent + ids).digest()
        keys.append(parent)
    assert keys_of(tokens) == keys
    for key in keys:
        assert public_hash(key) == int.from_bytes(key[:8], "little") % (2**63 - 1) + 1
        assert 1 <= public_hash(key) < 2**63


@given(tokens=token_lists, cut=st.integers(0, 20))
def test_keys_grow_with_the_tokens(tokens: list[int], cut: int) -> None:
    """Each block is hashed once in the life of a request, however it comes to its tokens."""
    keys = keys_of(tokens[:cut])
    before = keys.copy()
    extend_keys(keys, array("i", tokens), BLOCK_SIZE, ROOT)
    assert keys[: len(before)] == before
    assert keys == keys_of(tokens)
    assert len(keys) == len(tokens) // BLOCK_SIZE


@given(first=token_lists, second=token_lists)
def test_equal_keys_mean_equal_prefixes(first: list[int], second: list[int]) -> None:
    """A key stands for all that comes before as well, so it can be looked up on its own."""
    for place, (one, other) in enumerate(zip(keys_of(first), keys_of(second), strict=False)):
        end = (place + 1) * BLOCK_SIZE
        assert (one == other) == (first[:end] == second[:end])


def test_every_salt_has_a_root_of_its_own() -> None:
    """No salt is upstream's root, so that keys without one are upstream's."""
    assert root_of("") == ROOT == bytes(32)
    assert len({root_of(salt) for salt in ("", "a", "b", "ab", "\0")}) == 5
    assert len(root_of("a")) == len(ROOT)
    assert keys_of([1, 2], root_of("a")) != keys_of([1, 2])


def test_tokens_that_do_not_fill_a_block_have_no_key() -> None:
    """What is shared is a whole block."""
    assert keys_of([1]) == keys_of([]) == []
    assert keys_of([1, 2, 3]) == keys_of([1, 2])


# ---- the index -----------------------------------------------------------------------------------


def test_the_longest_known_prefix_is_found() -> None:
    """Whole blocks, from the first on, as far as they are known."""
    index = index_of((1, 1, 2, 2, 3, 3))
    assert found(index, (1, 1, 2, 2, 3, 3, 4)) == [0, 1, 2]
    assert found(index, (1, 1, 2, 2, 9, 9)) == [0, 1]
    assert found(index, (1, 1, 2)) == [0]
    assert found(index, (9, 9, 2, 2)) == []
    assert found(index, (1, 1, 2, 2, 3, 3), most=2) == [0, 1]
    assert found(index, (1, 1), most=0) == []


def test_an_index_knows_only_its_own_blocks() -> None:
    """A block that no prefix ends with is free to be written."""
    index = index_of((1, 1, 2, 2))
    assert len(index) == 2
    assert BlockId(1) in index
    assert BlockId(2) not in index
    assert (index.first_of(BlockId(1)), index.first_of(BlockId(2))) == (1, None)


def test_a_prefix_under_another_root_is_not_found() -> None:
    """Tenants are apart from the first block on."""
    index = index_of((1, 1, 2, 2), root=root_of("red"))
    assert found(index, (1, 1, 2, 2), root=root_of("red")) == [0, 1]
    assert found(index, (1, 1, 2, 2), root=root_of("blue")) == []
    assert found(index, (1, 1, 2, 2)) == []


def test_a_forgotten_block_ends_what_is_found() -> None:
    """And may be made known again, as any block."""
    index = index_of((1, 1, 2, 2))
    index.forget([BlockId(1)])
    index.forget([BlockId(1), BlockId(5)])
    index.check()
    assert BlockId(1) not in index
    assert found(index, (1, 1, 2, 2)) == [0]
    prompt = (1, 1, 2, 2)
    index.add(BlockId(7), filled(1, prompt, keys_of(prompt)[1]), BlockId(0))
    assert found(index, prompt) == [0, 7]


def test_copies_of_a_block_stand_by() -> None:
    """Two requests may compute the same block; the first is found, and after it the next that is left."""
    index = index_of((1, 1), (1, 1), (1, 1), (1, 1))
    assert found(index, (1, 1)) == [0]
    assert [index.first_of(BlockId(block)) for block in range(4)] == [0, 0, 0, 0]
    for forgotten, first in [(1, 0), (0, 2), (2, 3)]:
        index.forget([BlockId(forgotten)])
        index.check()
        assert found(index, (1, 1)) == [first]
        assert index.first_of(BlockId(3)) == first
    index.forget([BlockId(3)])
    index.check()
    assert found(index, (1, 1)) == []
    assert len(index) == 0


def test_a_cleared_index_finds_nothing_and_takes_no_child_of_what_it_knew() -> None:
    """A row that goes on across a change of the weights has blocks that depend on the old ones."""
    prompt = (1, 1, 2, 2)
    index = index_of((1, 1), (1, 1))
    index.clear()
    index.check()
    assert len(index) == 0
    assert found(index, (1, 1)) == []
    index.add(BlockId(5), filled(1, prompt, keys_of(prompt)[1]), BlockId(0))
    assert BlockId(5) not in index


@pytest.mark.parametrize("first", [(9, 9), (1, 2)])
def test_a_key_that_two_prefixes_have_stays_with_the_first(first: Tokens) -> None:
    """Tokens are compared, so that a collision costs a hit and never an answer."""
    key = keys_of((1, 1))[0]
    index = PrefixIndex(NUM_BLOCKS, BLOCK_SIZE)
    index.add(BlockId(0), filled(0, first, key), None)
    index.add(BlockId(1), filled(0, (1, 1), key), None)
    assert BlockId(0) in index
    assert BlockId(1) not in index
    assert found(index, (1, 1)) == []


def test_nothing_is_known_behind_a_block_that_is_not() -> None:
    """Its key would say that it follows the prefix that has the key of the block before it."""
    prompt = (1, 1, 2, 2)
    first, second = keys_of(prompt)
    index = PrefixIndex(NUM_BLOCKS, BLOCK_SIZE)
    index.add(BlockId(0), filled(0, (9, 9), first), None)
    index.add(BlockId(1), filled(0, prompt, first), None)
    index.add(BlockId(2), filled(1, prompt, second), BlockId(1))
    assert BlockId(2) not in index


def test_equal_tokens_under_another_parent_are_not_found() -> None:
    """The key and the tokens of the second block are right; it follows something else."""
    prompt, other = (1, 1, 2, 2), (9, 9, 2, 2)
    index = index_of((1, 1), (9, 9))
    index.add(
        BlockId(2),
        FilledBlock(Row(0), 1, keys_of(prompt)[1], keys_of(other)[0], pack_ints((2, 2))),
        BlockId(1),
    )
    assert found(index, prompt) == [0]


def test_names_that_do_not_agree_fail_the_check() -> None:
    """The pool's own check leans on it."""
    for key, message in [(b"key", "are found by keys they do not have"), (keys_of((1, 1))[0], "are known")]:
        index = index_of((1, 1), (2, 2))
        index.check()
        del index._blocks[keys_of((2, 2))[0]]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        index._blocks[key] = BlockId(0)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(AssertionError, match=message):
            index.check()
