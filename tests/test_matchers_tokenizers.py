"""Grammars work with the tokenizers that users bring, and say so of those they can't work with."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelEncoder

from megallm.core_async.matchers import Matchers
from megallm.core_async.structured import grammar_of
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.models.base_tokenizer import SpecialIds
from megallm.models.tokenizer import ByteLevelTokenizer
from tests.byte_tokenizer import ByteTokenizer

VOCAB = 300


def made(**fields: object) -> str:
    """Gives the grammar of some fields."""
    return grammar_of(SimpleNamespace(**fields))


class FastTokenizer:
    """The part of a fast Hugging Face tokenizer that is used."""

    eos_token_id = 256
    vocab_size = 259

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Gives a text's ids."""
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        """Gives the text of ids."""
        return self.backend_tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


def byte_level() -> Tokenizer:
    """Gives a byte-level tokenizer: the bytes, an end and two merges."""
    symbols = sorted(ByteLevelEncoder.alphabet())
    vocabulary = {symbol: place for place, symbol in enumerate([*symbols, "<|end|>", "ab", "abc"])}
    backend = Tokenizer(BPE(vocabulary, [("a", "b"), ("ab", "c")]))
    backend.pre_tokenizer = ByteLevelEncoder(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    untyped: Any = backend  # Any: its methods have half of their types
    untyped.add_special_tokens(["<|end|>"])
    return backend


@pytest.mark.parametrize("field", [{"regex": "[a-c<>|él]*"}, {"json_schema": True}, {"choice": ["<|end|>"]}])
def test_hugging_faces_tokenizers_are_read_as_our_own(field: dict[str, object]) -> None:
    """Given as they are, or wrapped by megatron; none of them has token_bytes."""
    backend = byte_level()
    fast = FastTokenizer(backend)
    wrapped = SimpleNamespace(
        tokenize=partial(fast.encode, add_special_tokens=False),
        detokenize=partial(fast.decode, skip_special_tokens=True),
        eod=256,
        vocab_size=259,
        _tokenizer=SimpleNamespace(tokenizer=fast),
    )
    masks: list[bytes] = []
    for tokenizer in (ByteLevelTokenizer(backend, special_ids=SpecialIds(eos=256)), fast, wrapped):
        matcher = Matchers(TokenizerAdapter(tokenizer), VOCAB).matcher(made(**field))
        masks.append(matcher.compute_bitmask())
        matcher.consume_tokens(backend.encode('"a').ids)
        masks.append(matcher.compute_bitmask())
    assert masks[:2] == masks[2:4] == masks[4:]


def test_a_model_with_fewer_ids_than_the_tokenizer_is_refused_by_name() -> None:
    """Some of the grammar's tokens would have no logit."""
    with pytest.raises(ValueError, match="can't use the tokenizer, a FastTokenizer: vocab size too small"):
        Matchers(TokenizerAdapter(FastTokenizer(byte_level())), 200).check(made(choice=["a"]))


class NullTokenizer:
    """Numbers are its words, as megatron's null tokenizer."""

    vocab_size = 10
    eod = 9

    def tokenize(self, text: str) -> list[int]:
        """Gives the numbers of a text."""
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Gives the numbers as text."""
        return " ".join(map(str, tokens))


def test_a_tokenizer_without_bytes_is_refused_by_name() -> None:
    """A mask can't be made for it, and guessing would let through what does not match."""
    with pytest.raises(ValueError, match=r"a NullTokenizer, has no token_bytes\(id\)"):
        Matchers(TokenizerAdapter(NullTokenizer()), 10).check(made(choice=["a"]))


def test_a_tokenizer_without_an_end_is_refused_by_name() -> None:
    """A complete output could not be ended."""

    class Endless(ByteTokenizer):
        eod: Any = None

    with pytest.raises(ValueError, match="a Endless, names none"):
        Matchers(TokenizerAdapter(Endless()), VOCAB).check(made(choice=["a"]))
