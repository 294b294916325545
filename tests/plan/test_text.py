"""Incremental detokenisation against decoding all at once, and stop words against brute force."""

from collections.abc import Iterator

from hypothesis import example, given
from hypothesis import strategies as st

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
