"""Incremental detokenisation by examples, and what it costs."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megallm.core_async.plan.text import TextStream
from tests.plan.test_text import (
    BROKEN,
    FAMILY,
    KANJI,
    SIZES,
    ByteTokens,
    WordTokens,
    byte_pieces,
    cut,
    grouped,
    stream_all,
)


def byte_stream(pieces: list[str], *stop_words: str, keep_stop: bool = False) -> tuple[TextStream, list[str]]:
    """Streams pieces of text one by one; gives the stream and its deltas, that of `finish` the last."""
    tokens = ByteTokens([piece.encode() for piece in pieces])
    stream = TextStream(tokens.detokenize, stop_words, keep_stop=keep_stop)
    return stream, stream_all(stream, ([i] for i in tokens.ids))


def test_a_stop_word_inside_a_token_cuts_the_token() -> None:
    """Engines that compare token ids run past it."""
    stream, deltas = byte_stream(["one", "\n\ntwo", "three"], "\n")
    assert deltas == ["one", "", "", ""]
    assert stream.stop == "\n"
    assert stream.num_kept_tokens == 1


def test_a_token_that_begins_before_the_stop_word_is_kept() -> None:
    """It has text of its own, so its log-probability belongs to the result."""
    stream, deltas = byte_stream(["one", " two\n\nthree"], "\n")
    assert deltas == ["one", " two", ""]
    assert stream.num_kept_tokens == 2


def test_a_stop_word_across_three_tokens_is_never_begun() -> None:
    """The first part of a stop word in a stream can't be taken back."""
    stream, deltas = byte_stream(["A", "B", "C", "D", "E", "F"], "CDE")
    assert deltas == ["A", "B", "", "", "", "", ""]
    assert stream.text == "AB"
    assert stream.num_kept_tokens == 2


def test_tokens_are_safe_once_their_text_is_shown() -> None:
    """A stream that sends ids along with the text must not send those of a stop word either."""
    tokens = ByteTokens([b"A", b"C", b"D", b"x", b"C", b"D", b"E"])
    stream = TextStream(tokens.detokenize, ("CDE",))
    counts: list[int] = []
    for token_id in tokens.ids:
        stream.append([token_id])
        counts.append(stream.num_safe_tokens)
    assert counts == [1, 1, 1, 4, 4, 4, 4]
    assert stream.num_kept_tokens == 4


def test_all_tokens_are_safe_when_no_stop_word_came() -> None:
    """Also those without text, and those whose text was held back."""
    for stop_words in [(), ("CDE",)]:
        tokens = ByteTokens([b"A", b"C", b""])
        stream = TextStream(tokens.detokenize, stop_words)
        stream.append(tokens.ids)
        stream.finish()
        assert (stream.num_safe_tokens, stream.num_kept_tokens) == (3, 3)


def test_the_start_of_a_stop_word_that_does_not_come_is_shown_then() -> None:
    """Held back is not lost: neither in the middle nor at the end."""
    stream, deltas = byte_stream(["A", "C", "D", "x", "C"], "CDE")
    assert deltas == ["A", "", "", "CDx", "", "C"]
    assert stream.stop is None
    assert stream.num_kept_tokens == 5


def test_a_start_inside_a_start_is_held_on() -> None:
    """When `aab` is read after `aa`, the last `a` may still begin it."""
    _, deltas = byte_stream(["a", "a", "a", "c", "a"], "aab")
    assert deltas == ["", "", "a", "aac", "", "a"]


def test_of_overlapping_stop_words_the_one_complete_first_wins() -> None:
    """A rule that waits for a longer one would generate tokens that are thrown away."""
    stream, deltas = byte_stream(["x", "ab", "cd"], "abcd", "bc")
    assert (stream.text, stream.stop) == ("xa", "bc")
    assert "".join(deltas) == "xa"


def test_of_stop_words_complete_together_the_longest_wins() -> None:
    """Else the first half of the longer one would stay in the text."""
    for words in [("bcd", "abcd", "d"), ("d", "abcd", "bcd")]:
        stream, _ = byte_stream(["x", "abc", "d"], *words)
        assert (stream.text, stream.stop) == ("x", "abcd")


def test_an_emoji_split_into_bytes_comes_out_whole() -> None:
    """No delta ever has U+FFFD in it when the text has none."""
    text = f"{FAMILY} {KANJI} é"
    tokens = ByteTokens(cut(text.encode(), [1]))
    stream = TextStream(tokens.detokenize)
    deltas = stream_all(stream, ([i] for i in tokens.ids))
    assert "".join(deltas) == text
    assert not any(BROKEN in delta for delta in deltas)


def test_text_before_a_half_character_is_shown_at_once() -> None:
    """Tokens that end inside a character are common in CJK; holding all of them stalls the stream."""
    data = ("a" + KANJI).encode()
    tokens = ByteTokens([data[:3], data[3:6], data[6:]])
    stream = TextStream(tokens.detokenize)
    assert [stream.append([i]) for i in tokens.ids] == ["a", "漢", "字"]
    assert stream.finish() == ""


def test_a_half_character_at_the_end_is_given_by_finish() -> None:
    """The length limit may fall inside a character; decoding at once shows U+FFFD, so the stream does."""
    tokens = ByteTokens([b"a", b"\xf0\x9f"])
    stream = TextStream(tokens.detokenize)
    assert stream.append(tokens.ids) == "a"
    assert stream.finish() == BROKEN
    assert stream.text == "a" + BROKEN
    assert stream.num_kept_tokens == 2


def test_a_stop_word_may_complete_in_finish() -> None:
    """Held back text is searched like all other."""
    tokens = ByteTokens([b"a", b"\xf0\x9f"])
    stream = TextStream(tokens.detokenize, (BROKEN,))
    assert stream.append(tokens.ids) == "a"
    assert stream.finish() == ""
    assert (stream.text, stream.stop, stream.num_kept_tokens) == ("a", BROKEN, 1)


def test_keep_stop_leaves_the_stop_word_and_holds_nothing_back() -> None:
    """What is not cut need not wait; what follows the stop word is still cut."""
    stream, deltas = byte_stream(["A", "C", "DE", "F"], "CD", keep_stop=True)
    assert deltas == ["A", "C", "D", "", ""]
    assert (stream.text, stream.stop, stream.num_kept_tokens) == ("ACD", "CD", 3)


def test_a_stop_word_at_the_very_start_leaves_nothing() -> None:
    """An empty text keeps no token, not even one without text of its own."""
    tokens = ByteTokens([b"", b"\n", b"a"])
    stream = TextStream(tokens.detokenize, ("\n",))
    assert stream.append(tokens.ids) == ""
    assert (stream.text, stream.stop, stream.num_kept_tokens) == ("", "\n", 0)


def test_a_long_stop_word_is_counted_back_to_its_first_token() -> None:
    """The tokens to drop may lie far behind the window that is decoded."""
    stream, _ = byte_stream(["x", *"abcdefghij" * 10, "."], "abcdefghij" * 10 + ".")
    assert (stream.text, stream.num_kept_tokens) == ("x", 1)


def test_tokens_after_the_stop_word_are_ignored() -> None:
    """Two plans are in flight: tokens that were sampled too much still arrive."""
    tokens = ByteTokens([b"a", b"\n", b"b"])
    stream = TextStream(tokens.detokenize, ("\n",))
    assert [stream.append([i]) for i in tokens.ids] == ["a", "", ""]
    assert stream.finish() == ""
    assert (stream.text, stream.num_kept_tokens) == ("a", 1)


def test_finish_comes_last_and_gives_its_text_once() -> None:
    """Tokens after the last delta would be lost without a word."""
    tokens = ByteTokens([b"a", b"b"])
    stream = TextStream(tokens.detokenize, ("ab",))
    assert stream.append([0]) == ""
    assert stream.finish() == "a"
    assert stream.finish() == ""
    with pytest.raises(AssertionError, match=r"1 tokens came after finish\(\)"):
        stream.append([1])


def test_an_empty_stop_word_is_refused() -> None:
    """It would match before the first token; requests are checked long before this."""
    with pytest.raises(AssertionError, match="an empty stop word"):
        TextStream(ByteTokens([]).detokenize, ("a", ""))


def test_an_append_of_nothing_changes_nothing() -> None:
    """A step may bring no token for a stream, also in the middle of a character."""
    tokens = ByteTokens([b"a\xc3", b"\xa9"])
    stream = TextStream(tokens.detokenize, ("x",))
    assert [stream.append(ids) for ids in ([], [0], [], [], [1], [])] == ["", "a", "", "", "é", ""]
    assert stream.num_kept_tokens == 2


def test_invalid_byte_pieces_cost_no_text_that_is_whole() -> None:
    """Such a decoder calls a whole run invalid after the fact; what was shown stays, the rest goes on."""
    pieces = ["▁a", *byte_pieces("漢"), "<0xFF>", "b", "▁c", *byte_pieces("字")]
    tokens = WordTokens(pieces)
    assert tokens.detokenize(tokens.ids) == f"a{BROKEN * 4}b c字"
    for size in (1, 2, 3, len(pieces)):
        stream = TextStream(tokens.detokenize)
        assert "".join(stream_all(stream, grouped(tokens.ids, [size]))) == f"a漢{BROKEN}b c字"


def test_an_invalid_byte_piece_at_the_end_is_given_by_finish() -> None:
    """Also where the decoder takes back what was shown before it."""
    tokens = WordTokens([*byte_pieces("漢"), "<0xFF>"])
    stream = TextStream(tokens.detokenize)
    assert stream.append(tokens.ids) == "漢"
    assert stream.finish() == BROKEN


# ---- cost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_words", [(), ("never",)])
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("data", "lengths"),
    [
        (b"word " * 200, [3]),
        (FAMILY.encode() * 50, [1]),
        (KANJI.encode() * 150, [2]),
        (b"\xff" * 900, [1]),
        (b"\xf0\x9f\x98" * 300, [3]),
        (b"a" * 2, [1, *[0] * 900]),
    ],
    ids=["words", "bytes", "always inside a character", "garbage", "half characters", "tokens without text"],
)
def test_a_bounded_number_of_ids_is_decoded_for_each_token(
    data: bytes, lengths: list[int], size: int, stop_words: tuple[str, ...]
) -> None:
    """Decoding everything again for each token makes long outputs quadratic."""
    tokens = ByteTokens(cut(data, lengths))
    stream = TextStream(tokens.detokenize, stop_words)
    assert "".join(stream_all(stream, grouped(tokens.ids, [size]))) == data.decode("utf-8", "replace")
    assert tokens.num_decoded <= 64 * len(tokens.ids)
    assert size > 1 or tokens.max_window <= 48


def test_a_long_run_of_byte_pieces_keeps_the_window_short() -> None:
    """Scripts outside the vocabulary come as bytes for a whole answer; a run cut wrongly breaks all of it."""
    tokens = WordTokens(byte_pieces(KANJI * 200))
    stream = TextStream(tokens.detokenize, ("never",))
    assert "".join(stream_all(stream, ([i] for i in tokens.ids))) == KANJI * 200
    assert tokens.max_window <= 24


# ---- the decoders of the field ---------------------------------------------------------------------


def byte_level_tokenizer() -> tuple[Tokenizer, Callable[[str], list[int]]]:
    """Gives Hugging Face's byte-level decoder over single bytes, and how to encode."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, lambda text: tokenizer.encode(text).ids


def byte_fallback_tokenizer() -> tuple[Tokenizer, Callable[[str], list[int]]]:
    """Gives Llama's decoder over letters, the space and single bytes, and how to encode."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )

    def encode(text: str) -> list[int]:
        marked = "▁" + text.replace(" ", "▁")
        return [ids[piece] for char in marked for piece in ([char] if char in ids else byte_pieces(char))]

    return tokenizer, encode


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
@given(text=st.text(st.sampled_from("ab é漢字😀\u200d"), max_size=60), sizes=SIZES)
def test_the_decoders_of_the_field_stream_as_they_decode_at_once(
    make: Callable[[], tuple[Tokenizer, Callable[[str], list[int]]]], text: str, sizes: list[int]
) -> None:
    """The fakes above are only as good as what they stand for."""
    tokenizer, encode = make()
    ids = encode(text)
    stream = TextStream(tokenizer.decode)
    assert "".join(stream_all(stream, grouped(ids, sizes))) == tokenizer.decode(ids) == text
