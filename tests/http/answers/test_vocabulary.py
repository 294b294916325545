"""Single tokens: their bytes and their spelling."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.answers.vocabulary import Vocabulary, byte_alphabet
from tests.byte_tokenizer import PIECES, ByteTokenizer
from tests.fakes import FakeTokenizer


def test_a_tokenizer_that_tells_bytes_is_asked() -> None:
    """A part of a character has bytes and no text; a special token is shown as it is spelled."""
    vocabulary = Vocabulary(TokenizerAdapter(ByteTokenizer()))
    assert (vocabulary.bytes_of(65), vocabulary.spelling(65)) == (b"A", "A")
    assert vocabulary.bytes_of(258 + len(PIECES) - 1) == "世".encode()[:2]
    assert vocabulary.spelling(258 + len(PIECES) - 1) == "bytes:\\xe4\\xb8"
    assert (vocabulary.spelling(256), vocabulary.is_shown(256)) == ("<|end|>", False)
    assert vocabulary.is_shown(65)


def test_an_id_past_the_tokenizers_is_nothing() -> None:
    """Models pad their vocabulary."""
    vocabulary = Vocabulary(TokenizerAdapter(ByteTokenizer()))
    assert (vocabulary.bytes_of(10_000), vocabulary.spelling(-1), vocabulary.is_shown(10_000)) == (
        b"",
        "",
        False,
    )


def test_one_that_only_detokenises_gives_its_text() -> None:
    """That is all it has."""
    vocabulary = Vocabulary(TokenizerAdapter(FakeTokenizer()))
    assert (vocabulary.bytes_of(33), vocabulary.spelling(33)) == (b"A", "A")


class Fast:
    """A fast tokenizer in Hugging Face's shape."""

    bos_token_id = None
    eos_token_id = 3

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend
        self.vocab_size = backend.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Gives the ids of a text."""
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Gives the text of ids."""
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    ("tokens", "decoder", "expected"),
    [
        (["Ġa", "Ã", "b"], decoders.ByteLevel(), [b" a", b"\xc3", b"b"]),
        (["▁a", "<0xC3>", "Ã"], decoders.ByteFallback(), [b" a", b"\xc3", "Ã".encode()]),
    ],
    ids=["byte level", "byte fallback"],
)
def test_a_fast_tokenizers_entries_give_exact_bytes(
    tokens: list[str], decoder: object, expected: list[bytes]
) -> None:
    """Its text of one token has lost them."""
    # Any: tokenizers has no types
    backend: Any = Tokenizer(
        models.WordLevel({token: at for at, token in enumerate(tokens)}, unk_token=tokens[2])
    )
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    vocabulary = Vocabulary(TokenizerAdapter(Fast(backend)))
    assert [vocabulary.bytes_of(at) for at in range(3)] == expected
    assert (vocabulary.bytes_of(3), vocabulary.is_shown(3)) == (b"<end>", False)


def test_the_byte_alphabet_has_each_byte_once() -> None:
    """GPT-2's table is a bijection."""
    assert sorted(byte_alphabet().values()) == list(range(256))
