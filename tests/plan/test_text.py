"""Incremental detokenisation against decoding all at once, and stop words against brute force."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megallm.core_async.plan.text import Detokenize, TextStream

BROKEN = "\N{REPLACEMENT CHARACTER}"
FAMILY = "👩‍👩‍👧"
KANJI = "漢字"


class ByteTokens:
    """A byte-level tokenizer: each id is the piece of bytes that was cut for it, whole characters or not."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.ids = list(range(len(pieces)))
        self.num_decoded = 0
        self.max_window = 0

    def detokenize(self, ids: list[int]) -> str:
        """Gives U+FFFD for what is not UTF-8, as the decoders of the field do."""
        self.num_decoded += len(ids)
        self.max_window = max(self.max_window, len(ids))
        return b"".join([self.pieces[i] for i in ids]).decode("utf-8", "replace")


class WordTokens:
    """A SentencePiece-like tokenizer, as Hugging Face decodes it: `▁` is a space, the first is dropped.

    A run of byte pieces such as `<0xE6>` is its characters if all of it is UTF-8, else each byte is U+FFFD.
    """

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces
        self.ids = list(range(len(pieces)))
        self.max_window = 0

    def detokenize(self, ids: list[int]) -> str:
        """Gives the text of ids."""
        self.max_window = max(self.max_window, len(ids))
        text, run = "", b""
        for piece in [*(self.pieces[i] for i in ids), ""]:
            if piece.startswith("<0x"):
                run += bytes([int(piece[3:5], 16)])
                continue
            text += _whole_or_broken(run) + piece.replace("▁", " ")
            run = b""
        return text.removeprefix(" ")


def _whole_or_broken(run: bytes) -> str:
    try:
        return run.decode()
    except UnicodeDecodeError:
        return BROKEN * len(run)


def byte_pieces(text: str) -> list[str]:
    """Gives the byte pieces of a text that no other piece covers."""
    return [f"<0x{byte:02X}>" for byte in text.encode()]


def cut(text: bytes, lengths: list[int]) -> list[bytes]:
    """Cuts bytes into pieces of these lengths, over and over; a length of 0 is a token without text."""
    pieces: list[bytes] = []
    lengths = lengths if any(lengths) else [1]
    while text:
        for length in lengths:
            pieces.append(text[:length])
            text = text[length:]
    return pieces


def grouped(ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """Gives the ids in groups of these sizes, over and over."""
    start = 0
    while start < len(ids):
        for size in sizes:
            yield ids[start : start + size]
            start += size


def stream_all(stream: TextStream, groups: Iterator[list[int]]) -> list[str]:
    """Runs a stream to its end; gives what each call showed."""
    deltas = [stream.append(group) for group in groups]
    return [*deltas, stream.finish()]


def first_stop(text: str, stop_words: tuple[str, ...]) -> str | None:
    """Gives the first complete stop word, the longest of those complete at the same character."""
    for end in range(len(text) + 1):
        ending = [word for word in stop_words if text[:end].endswith(word)]
        if ending:
            return max(ending, key=len)
    return None


def kept_text(text: str, stop_words: tuple[str, ...], *, keep_stop: bool) -> str:
    """Cuts a text at its first stop word."""
    for end in range(len(text) + 1):
        stop = first_stop(text[:end], stop_words)
        if stop is not None:
            return text[: end if keep_stop else end - len(stop)]
    return text


def num_tokens_of(kept: str, ids: list[int], detokenize: Detokenize) -> int:
    """Gives the fewest of the first ids whose text begins with `kept`."""
    return next(count for count in range(len(ids) + 1) if detokenize(ids[:count]).startswith(kept))


SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=5)
LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=5)
TEXTS = st.text(st.sampled_from("ab é漢字😀👩\u200d") | st.characters(codec="utf-8"), max_size=80)
GARBAGE = st.lists(
    st.sampled_from([b"a", "é".encode(), "漢".encode(), b"\xf0", b"\x9f", b"\xe6", b"\xff"])
).map(b"".join)
PIECES = st.lists(
    st.lists(st.sampled_from(["▁", "▁▁", "a", "▁a", "b.", "", "漢"]), max_size=6)
    | st.sampled_from(["😀", "é", KANJI, FAMILY]).map(byte_pieces),
    max_size=20,
).map(lambda lists: [piece for pieces in lists for piece in pieces])


@given(TEXTS.map(str.encode), LENGTHS, SIZES)
def test_a_byte_level_stream_equals_decoding_at_once(
    text: bytes, lengths: list[int], sizes: list[int]
) -> None:
    """Clients compare streamed with not streamed; a character split over tokens must come out whole."""
    tokens = ByteTokens(cut(text, lengths))
    stream = TextStream(tokens.detokenize)
    deltas = stream_all(stream, grouped(tokens.ids, sizes))
    assert "".join(deltas) == stream.text == text.decode()
    assert stream.num_kept_tokens == len(tokens.ids)
    assert stream.stop is None


@given(GARBAGE, LENGTHS, SIZES)
@example(b"\xff" * 100, [1], [1])
@example(b"\xf0\x9f" * 60, [2], [1])
@example(b"\xe6" + b"a" * 30 + b"\xe6", [1], [3])
def test_bytes_that_are_no_text_come_out_as_decoding_at_once_has_them(
    text: bytes, lengths: list[int], sizes: list[int]
) -> None:
    """A model may emit anything; a genuine U+FFFD is shown like other text and never held for ever."""
    tokens = ByteTokens(cut(text, lengths))
    stream = TextStream(tokens.detokenize)
    assert "".join(stream_all(stream, grouped(tokens.ids, sizes))) == text.decode("utf-8", "replace")


@given(PIECES, SIZES)
@example(["▁", "a"], [1])
@example(["", "▁a", "", "▁b"], [1])
@example(["a", *["▁"] * 40, "b"], [1])
@example(byte_pieces(KANJI * 60), [1])
@example(byte_pieces(KANJI * 60), [100])
def test_a_sentencepiece_stream_equals_decoding_at_once(pieces: list[str], sizes: list[int]) -> None:
    """Decoding a slice drops its leading space: a window that forgets that glues words together."""
    tokens = WordTokens(pieces)
    whole = tokens.detokenize(tokens.ids)
    tokens.max_window = 0
    stream = TextStream(tokens.detokenize)
    assert "".join(stream_all(stream, grouped(tokens.ids, sizes))) == stream.text == whole


ALPHABET = "abc é漢😀"
STOP_TEXTS = st.text(st.sampled_from(ALPHABET), max_size=30).map(str.encode) | GARBAGE
STOPS = st.lists(st.text(st.sampled_from("abc é漢😀" + BROKEN), min_size=1, max_size=5), max_size=4).map(
    tuple
)


@given(text=STOP_TEXTS, stop_words=STOPS, lengths=LENGTHS, sizes=SIZES, keep_stop=st.booleans())
@example(text=b"abcd", stop_words=("abcd", "bc"), lengths=[1], sizes=[4], keep_stop=False)
@example(text=b"abcd", stop_words=("bcd", "abcd"), lengths=[1], sizes=[1], keep_stop=False)
@example(text=b"aab", stop_words=("ab", "aaab"), lengths=[1], sizes=[1], keep_stop=False)
@example(text=b"\xf0\x9fb", stop_words=("b",), lengths=[1], sizes=[1], keep_stop=False)
@example(text=b"ab\xf0\x9f", stop_words=(BROKEN,), lengths=[1], sizes=[1], keep_stop=True)
def test_a_stream_with_stop_words_equals_brute_force(
    *, text: bytes, stop_words: tuple[str, ...], lengths: list[int], sizes: list[int], keep_stop: bool
) -> None:
    """Text, stop word and number of tokens hang on the tokens alone, not on how they came."""
    tokens = ByteTokens(cut(text, lengths))
    whole = text.decode("utf-8", "replace")
    kept = kept_text(whole, stop_words, keep_stop=keep_stop)
    stream = TextStream(tokens.detokenize, stop_words, keep_stop=keep_stop)
    deltas = stream_all(stream, grouped(tokens.ids, sizes))
    assert "".join(deltas) == stream.text == kept
    assert stream.stop == first_stop(whole, stop_words)
    if stream.stop is None:
        assert stream.num_kept_tokens == len(tokens.ids)
    else:
        assert stream.num_kept_tokens == num_tokens_of(kept, tokens.ids, tokens.detokenize)


@given(PIECES, STOPS, SIZES)
def test_stop_words_in_a_sentencepiece_stream_equal_brute_force(
    pieces: list[str], stop_words: tuple[str, ...], sizes: list[int]
) -> None:
    """The same, where a token's text depends on the tokens before it."""
    tokens = WordTokens(pieces)
    whole = tokens.detokenize(tokens.ids)
    kept = kept_text(whole, stop_words, keep_stop=False)
    stream = TextStream(tokens.detokenize, stop_words)
    assert "".join(stream_all(stream, grouped(tokens.ids, sizes))) == kept
    assert stream.stop == first_stop(whole, stop_words)
    if stream.stop is not None:
        assert stream.num_kept_tokens == num_tokens_of(kept, tokens.ids, tokens.detokenize)


@given(st.text(st.sampled_from(ALPHABET), max_size=30), STOPS, LENGTHS)
def test_no_more_is_held_back_than_may_be_cut(
    text: str, stop_words: tuple[str, ...], lengths: list[int]
) -> None:
    """A stream that lags behind its tokens is felt as a slow one."""
    tokens = ByteTokens(cut(text.encode(), lengths))
    stream = TextStream(tokens.detokenize, stop_words)
    for token_id in tokens.ids:
        stream.append([token_id])
        if stream.stop is not None:
            break
        whole = tokens.detokenize(tokens.ids[: token_id + 1]).rstrip(BROKEN)
        starts = [word[:length] for word in stop_words for length in range(1, len(word))]
        num_open = max((len(start) for start in starts if whole.endswith(start)), default=0)
        assert stream.text == whole[: len(whole) - num_open]
        if stop_words:
            assert stream.num_safe_tokens == num_tokens_of(stream.text, tokens.ids, tokens.detokenize)


# ---- each kind of fault ----------------------------------------------------------------------------


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
