"""Prompts as token ids."""

from collections.abc import Sequence

import pytest

from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.bodies.prompts import PromptField, TextEncoder, prompts_of
from megallm.http.errors import RequestError
from tests.byte_tokenizer import ByteTokenizer
from tests.http.serving import BosTokenizer


@pytest.mark.parametrize(
    ("field", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_one_prompt_or_several(field: PromptField, prompts: list[str | list[int]]) -> None:
    """A list of numbers is one prompt."""
    assert prompts_of(field) == prompts


@pytest.mark.parametrize(
    ("field", "param"), [([], "prompt"), ([1, "a"], "prompt[1]"), (["a", [1]], "prompt[1]")]
)
def test_a_mixture_is_refused_where_it_begins(field: PromptField, param: str) -> None:
    """Which it means can't be known."""
    with pytest.raises(RequestError) as caught:
        prompts_of(field)
    assert caught.value.param == param


def test_a_tokenizer_that_puts_no_bos_gets_none() -> None:
    """One that the text spells out stays: chat prompts are sent as text too."""
    encoder = TextEncoder(TokenizerAdapter(ByteTokenizer()))
    assert encoder.encode("hi") == list(b"hi")
    assert encoder.encode("<|start|>hi") == [257, *b"hi"]
    assert encoder.encode("<|start|>hi", begins=False) == [257, *b"hi"]


def test_a_tokenizer_that_puts_one_gets_one() -> None:
    """A text that goes on has none of the tokenizer's; those it spells out are its own."""
    encoder = TextEncoder(TokenizerAdapter(BosTokenizer()))
    assert encoder.encode("hi") == [257, *b"hi"]
    assert encoder.encode("<|start|>hi") == [257, *b"hi"]
    assert encoder.encode("hi", begins=False) == list(b"hi")
    assert encoder.encode("<|start|>hi", begins=False) == [257, *b"hi"]
    assert encoder.encode("") == [257]


class EndingTokenizer(BosTokenizer):
    """One that puts an end behind every text."""

    def tokenize(self, text: str) -> list[int]:
        """Gives the ids of a text between a bos and an end."""
        return [*super().tokenize(text), self.eod]


def test_an_end_behind_a_text_is_left_out() -> None:
    """The model is to go on."""
    encoder = TextEncoder(TokenizerAdapter(EndingTokenizer()))
    assert encoder.encode("hi") == [257, *b"hi"]


class FaceTokenizer:
    """Hugging Face's interface; it can't take everything."""

    vocab_size = 300
    bos_token_id = None
    eos_token_id = 256

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Gives the ids of a text."""
        if not text.isascii():
            raise UnicodeError("secret")
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Gives the text of ids."""
        return bytes(ids).decode()


def test_hugging_faces_interface_is_taken_and_its_errors_are_not_repeated() -> None:
    """A text that the tokenizer can't take is the caller's fault."""
    encoder = TextEncoder(TokenizerAdapter(FaceTokenizer()))
    assert encoder.encode("hi") == list(b"hi")
    with pytest.raises(RequestError) as caught:
        encoder.encode("é")
    assert "secret" not in str(caught.value)
