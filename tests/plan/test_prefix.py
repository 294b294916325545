"""Keys of prefixes, and the index that finds blocks by them."""

from array import array
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.messages import BlockId, FilledBlocks, Row, pack_ints
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
            index.add([BlockId(number)], filled(place, prompt, key, root), before)
            before = BlockId(number)
            number += 1
    index.check()
    return index


def filled(place: int, prompt: Tokens, key: bytes, root: bytes = ROOT) -> FilledBlocks:
    """Gives what the index is told of a block of a prompt."""
    keys = keys_of(prompt, root)
    tokens = pack_ints(prompt[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE])
    return FilledBlocks(Row(0), place, [key], keys[place - 1] if place else root, tokens)


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
    index.add([BlockId(7)], filled(1, prompt, keys_of(prompt)[1]), BlockId(0))
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
    index.add([BlockId(5)], filled(1, prompt, keys_of(prompt)[1]), BlockId(0))
    assert BlockId(5) not in index


@pytest.mark.parametrize("first", [(9, 9), (1, 2)])
def test_a_key_that_two_prefixes_have_stays_with_the_first(first: Tokens) -> None:
    """Tokens are compared, so that a collision costs a hit and never an answer."""
    key = keys_of((1, 1))[0]
    index = PrefixIndex(NUM_BLOCKS, BLOCK_SIZE)
    index.add([BlockId(0)], filled(0, first, key), None)
    index.add([BlockId(1)], filled(0, (1, 1), key), None)
    assert BlockId(0) in index
    assert BlockId(1) not in index
    assert found(index, (1, 1)) == []


def test_nothing_is_known_behind_a_block_that_is_not() -> None:
    """Its key would say that it follows the prefix that has the key of the block before it."""
    prompt = (1, 1, 2, 2)
    first, second = keys_of(prompt)
    index = PrefixIndex(NUM_BLOCKS, BLOCK_SIZE)
    index.add([BlockId(0)], filled(0, (9, 9), first), None)
    index.add([BlockId(1)], filled(0, prompt, first), None)
    index.add([BlockId(2)], filled(1, prompt, second), BlockId(1))
    assert BlockId(2) not in index


def test_equal_tokens_under_another_parent_are_not_found() -> None:
    """The key and the tokens of the second block are right; it follows something else."""
    prompt, other = (1, 1, 2, 2), (9, 9, 2, 2)
    index = index_of((1, 1), (9, 9))
    index.add(
        [BlockId(2)],
        FilledBlocks(Row(0), 1, [keys_of(prompt)[1]], keys_of(other)[0], pack_ints((2, 2))),
        BlockId(1),
    )
    assert found(index, prompt) == [0]


def test_names_that_do_not_agree_fail_the_check() -> None:
    """The pool's own check leans on it."""
    index = index_of((1, 1), (2, 2))
    index._place_of[0] = 1  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match="are not where they say"):
        index.check()
    index = index_of((1, 1), (2, 2))
    index._run_of[5] = index._run_of[0]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match="are known"):
        index.check()


# ---- runs ----------------------------------------------------------------------------------------


def tell(index: PrefixIndex, blocks: list[int], prompt: Tokens, start: int, before: int | None) -> None:
    """Makes the blocks of a prompt from `start` on known, all at once."""
    keys = keys_of(prompt)
    end = start + len(blocks)
    filled = FilledBlocks(
        Row(0),
        start,
        keys[start:end],
        keys[start - 1] if start else ROOT,
        pack_ints(prompt[start * BLOCK_SIZE : end * BLOCK_SIZE]),
    )
    index.add([*map(BlockId, blocks)], filled, None if before is None else BlockId(before))
    index.check()


def test_prompts_that_part_half_way_are_both_found() -> None:
    """The second's own blocks begin behind the last that they have in common."""
    index = PrefixIndex(NUM_BLOCKS, BLOCK_SIZE)
    first, second = (1, 1, 2, 2, 3, 3), (1, 1, 2, 2, 7, 7)
    tell(index, [0, 1, 2], first, 0, None)
    tell(index, [5], second, 2, before=1)
    assert found(index, first) == [0, 1, 2]
    assert found(index, second) == [0, 1, 5]
    index.forget([BlockId(2)])
    tell(index, [4], (1, 1, 2, 2, 9, 9), 2, before=1)
    assert found(index, second) == [0, 1, 5]
    assert found(index, (1, 1, 2, 2, 9, 9)) == [0, 1, 4]
    index.forget(map(BlockId, [4, 5, 1]))
    index.check()
    assert found(index, first) == [0]


def test_a_prompt_computed_twice_goes_on_behind_its_copies() -> None:
    """All of it stands by, and what comes after is found behind the first."""
    index = PrefixIndex(NUM_BLOCKS, BLOCK_SIZE)
    prompt, longer = (1, 1, 2, 2), (1, 1, 2, 2, 3, 3)
    tell(index, [0, 1], prompt, 0, None)
    tell(index, [2, 3, 4], longer, 0, None)
    tell(index, [5], (*longer, 8, 8), 3, before=4)
    assert found(index, (*longer, 8, 8)) == [0, 1, 4, 5]
    index.forget([BlockId(1), BlockId(0)])
    index.check()
    assert found(index, (*longer, 8, 8)) == [2, 3, 4, 5]


def test_a_copy_of_a_run_that_begins_half_way_stands_by() -> None:
    """The same continuation may be computed behind a block by two requests, or behind its copy."""
    index = PrefixIndex(NUM_BLOCKS, BLOCK_SIZE)
    tell(index, [0, 1], (1, 1, 2, 2), 0, None)
    tell(index, [2], (1, 1, 7, 7), 1, before=0)
    tell(index, [3], (1, 1), 0, None)
    tell(index, [4], (1, 1, 7, 7), 1, before=3)
    assert found(index, (1, 1, 7, 7)) == [0, 2]
    assert index.first_of(BlockId(4)) == 2
    index.forget([BlockId(2), BlockId(0)])
    index.check()
    assert found(index, (1, 1, 7, 7)) == [3, 4]
    assert found(index, (1, 1, 2, 2)) == [3, 1]


def test_a_block_does_not_go_before_what_follows_it() -> None:
    """What is left would be found by nobody, and hold its room all the same."""
    index = index_of((1, 1, 2, 2))
    with pytest.raises(AssertionError, match="block 0 goes before what follows it"):
        index.forget([BlockId(0)])


@given(shared=st.integers(0, 6), length=st.integers(0, 6), most=st.integers(0, 7))
def test_a_run_is_found_as_far_as_the_tokens_are_equal(shared: int, length: int, most: int) -> None:
    """Compared all at once, and halved where they differ."""
    prompt = tuple(range(12))
    index = index_of(prompt)
    asked = (*prompt[: 2 * shared], *[99] * 2 * length)
    assert found(index, asked, most=most) == list(range(min(shared, most)))
