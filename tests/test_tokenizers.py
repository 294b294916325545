"""One interface for the tokenizers that users bring."""

from collections.abc import Sequence
from typing import Any

import pytest

from megallm.core_async.tokenizers import TokenizerAdapter
from tests.fakes import FakeTokenizer


class OldMegatron:
    """megatron's interface as older tokenizers have it; `bos` and `eod` raise where they do not exist."""

    vocab_size = 10

    def tokenize(self, text: str) -> list[int]:
        """Gives a bos, here always, and the letters' numbers."""
        return [1, *(ord(letter) - ord("a") + 2 for letter in text)]

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Gives all ids, special ones too."""
        return "".join("<s>" if token == 1 else chr(token - 2 + ord("a")) for token in tokens)

    @property
    def bos(self) -> int:
        """The id that begins a text."""
        return 1

    @property
    def eod(self) -> int:
        """Gives none: this vocabulary has no such id."""
        raise NotImplementedError


class HuggingFace:
    """The part of Hugging Face's interface that is used."""

    vocab_size = 10
    bos_token_id = 1
    eos_token_id = 2

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Gives the letters' numbers, after a bos where that is asked for."""
        self.calls.append((text, add_special_tokens))
        return [*([1] if add_special_tokens else []), *(ord(letter) - ord("a") + 3 for letter in text)]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Gives the letters, and the special ids where they are asked for."""
        special = {} if skip_special_tokens else {1: "<s>", 2: "</s>"}
        return "".join(special.get(token, chr(token - 3 + ord("a")) if token > 2 else "") for token in tokens)


def test_megatrons_interface_is_used_as_it_is() -> None:
    """The engine's tests and `load_model` use it."""
    adapter = TokenizerAdapter(FakeTokenizer())
    assert adapter.tokenize("AB") == [33, 34]
    assert adapter.detokenize([33, 34, FakeTokenizer.eod]) == "AB", "special tokens are no text"
    assert (adapter.bos, adapter.eod, adapter.vocab_size) == (None, FakeTokenizer.eod, 97)


def test_a_megatron_tokenizer_that_can_not_skip_special_tokens_is_taken_too() -> None:
    """Megatron's signature differs between tokenizers; upstream looks at it as well."""
    adapter = TokenizerAdapter(OldMegatron())
    assert adapter.detokenize([1, 2, 3]) == "<s>ab"


def test_a_bos_that_the_tokenizer_adds_is_taken_off() -> None:
    """`add_BOS` decides whether there is one; two in a row change what a model says."""
    adapter = TokenizerAdapter(OldMegatron())
    assert adapter.tokenize("ab") == [2, 3]
    assert adapter.tokenize("") == []
    assert adapter.bos == 1


def test_a_missing_end_of_document_is_none() -> None:
    """Megatron's property raises where the vocabulary has no such id."""
    assert TokenizerAdapter(OldMegatron()).eod is None


def test_hugging_faces_interface_is_taken_as_it_is() -> None:
    """Most users have such a tokenizer in their hands."""
    wrapped = HuggingFace()
    adapter = TokenizerAdapter(wrapped)
    assert adapter.tokenize("abc") == [3, 4, 5]
    assert wrapped.calls == [("abc", False)], "asked for no special tokens"
    assert adapter.detokenize([1, 3, 4, 2]) == "ab"
    assert (adapter.bos, adapter.eod) == (1, 2)
    assert adapter.wrapped is wrapped


def test_ids_that_are_none_or_negative_are_no_ids() -> None:
    """Hugging Face has None for a token that is not there, some of megatron's tokenizers -1."""

    class Bare(HuggingFace):
        bos_token_id: Any = None  # Any: overrides an int
        eos_token_id: Any = -1

    adapter = TokenizerAdapter(Bare())
    assert (adapter.bos, adapter.eod) == (None, None)


def test_detokenizing_takes_any_sequence_and_keeps_none() -> None:
    """Tokenizers change the list they get, some of them."""

    class Greedy(FakeTokenizer):
        def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            assert isinstance(tokens, list)
            text = super().detokenize(tokens, skip_special_tokens=skip_special_tokens)
            tokens.clear()
            return text

    ids = [33, 34]
    adapter = TokenizerAdapter(Greedy())
    assert adapter.detokenize(ids) == adapter.detokenize(tuple(ids)) == "AB"
    assert ids == [33, 34]


@pytest.mark.parametrize("wrong", [None, "tokenizer.json", object()])
def test_what_has_neither_interface_is_refused_by_class(wrong: object) -> None:
    """The mistake shows at construction, not as an AttributeError in a thread."""
    with pytest.raises(
        TypeError, match=rf"tokenizer is a {type(wrong).__name__} without tokenize/detokenize"
    ):
        TokenizerAdapter(wrong)


def test_an_answer_ends_at_every_end_that_the_checkpoint_names() -> None:
    """Chat models end a turn with another token than a text; with the eod alone they would talk on."""

    class Ends(FakeTokenizer):
        stop_ids = (2, 7)

    assert TokenizerAdapter(Ends()).end_ids == (2, 7)
    fake = TokenizerAdapter(FakeTokenizer())
    assert fake.end_ids == (() if fake.eod is None else (fake.eod,))
