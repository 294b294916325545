"""What every tokenizer of a checkpoint shares, over one of a few words."""

from collections.abc import Sequence

import pytest

from megallm.core_async.errors import InvalidRequestError
from megallm.models.base_tokenizer import ModelTokenizer, SpecialIds

WORDS = ["<s>", "</s>", "one", "two"]


class WordTokenizer(ModelTokenizer):
    """Ids of words between blanks."""

    def tokenize(self, text: str) -> list[int]:
        """Puts a bos in front."""
        return [0, *self.tokenize_rendered(text)]

    def tokenize_rendered(self, text: str) -> list[int]:
        """Puts nothing in front."""
        return [WORDS.index(word) for word in text.split()]

    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Puts blanks between."""
        return " ".join(WORDS[token_id] for token_id in tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Gives a word."""
        return WORDS[token_id].encode()


def test_a_template_s_ids_get_no_bos_of_the_tokenizer_s() -> None:
    """The template writes its own; two of them are another prompt."""
    tokenizer = WordTokenizer(
        WORDS, special_ids=SpecialIds(bos=0, eos=1), chat_template="{{ bos_token }} {{ messages[0].content }}"
    )
    assert tokenizer.apply_chat_template([{"role": "user", "content": "two"}]) == [0, 3]


def test_without_a_template_the_error_names_the_file() -> None:
    """Base models have none."""
    tokenizer = WordTokenizer(WORDS, special_ids=SpecialIds(), path="a.json")
    with pytest.raises(InvalidRequestError, match=r"tokenizer of a\.json has no chat template"):
        tokenizer.apply_chat_template([])


def test_megatron_s_names_and_ours_are_the_same_ids() -> None:
    """Code of either kind reads them."""
    tokenizer = WordTokenizer(WORDS, special_ids=SpecialIds(bos=0, eos=1))
    assert (tokenizer.bos, tokenizer.bos_id, tokenizer.eod, tokenizer.eos, tokenizer.eos_id) == (
        0,
        0,
        1,
        1,
        1,
    )
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.vocab_size) == (None, None, 4)
    assert tokenizer.offsets([2, 3], "onetwo") == [0, 3]
