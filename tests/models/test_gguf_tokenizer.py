"""Tokenizers out of GGUF metadata."""

from pathlib import Path

import pytest

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.gguf_file import GgufFile
from megallm.models.gguf_tokenizer import build_tokenizer
from megallm.models.tokenizer import ByteLevelTokenizer
from tests.models.tiny_gguf import Metadata, tiny_metadata, write_gguf


def build(folder: Path, changes: Metadata | None = None, without: str = "") -> ByteLevelTokenizer:
    """Builds the tokenizer of a file whose metadata is changed."""
    metadata = tiny_metadata() | (changes or {})
    metadata.pop(without, None)
    return build_tokenizer(GgufFile(write_gguf(folder / "tiny.gguf", metadata, {})))


def pieces(tokenizer: ByteLevelTokenizer, text: str) -> list[str]:
    """Gives a text's tokens as they are spelled."""
    return [tokenizer.vocab[token_id] for token_id in tokenizer.tokenize(text)]


def test_merges_apply_in_their_order(tmp_path: Path) -> None:
    """The merges are the tokenizer; the rest is how a text is split before them."""
    assert pieces(build(tmp_path), "the the") == ["the", "Ġthe"]


def test_digits_are_taken_apart_first_by_smollm_s_rule_only(tmp_path: Path) -> None:
    """So blanks before a digit stay together, as the model saw them in training."""
    assert pieces(build(tmp_path), "a  1") == ["a", "ĠĠ", "1"]
    assert pieces(build(tmp_path, {"tokenizer.ggml.pre": "gpt-2"}), "a  1") == ["a", "Ġ", "Ġ", "1"]


def test_control_tokens_are_special_and_user_defined_ones_are_whole_but_not_special(tmp_path: Path) -> None:
    """Skipping specials must keep the tags a model was taught to write."""
    tokenizer = build(tmp_path)
    assert pieces(tokenizer, "<think>a<|im_end|>") == ["<think>", "a", "<|im_end|>"]
    assert (
        tokenizer.detokenize(tokenizer.tokenize("<think>a<|im_end|>"), skip_special_tokens=True) == "<think>a"
    )


def test_a_file_that_asks_for_them_gets_bos_and_eos_around_plain_text_only(tmp_path: Path) -> None:
    """Chat templates write their own bos: adding another gives two."""
    tokenizer = build(
        tmp_path,
        {
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.add_eos_token": True,
            "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        },
    )
    assert pieces(tokenizer, "a") == ["<|im_start|>", "a", "<|im_end|>"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == tokenizer.tokenize("a")[:-1]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tokenizer.ggml.model", "llama", r"kind 'llama', supported is 'gpt2'"),
        ("tokenizer.ggml.pre", "qwen2", r"rule 'qwen2', supported are \['gpt-2', 'smollm'\]"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path: Path, key: str, value: str, said: str) -> None:
    """A tokenizer that is almost right is worse than none."""
    with pytest.raises(UnsupportedModelError, match=said):
        build(tmp_path, {key: value})


@pytest.mark.parametrize(
    ("changes", "without", "said"),
    [
        (
            {"tokenizer.ggml.token_type": [1, 2, 3]},
            "",
            r"token_type has 3 entries, tokenizer\.ggml\.tokens 264",
        ),
        ({"tokenizer.ggml.eos_token_id": 999}, "", r"eos_token_id is 999, the vocabulary has 264"),
        ({"tokenizer.ggml.merges": ["the"]}, "", r"merges has 'the', no pair"),
        ({"tokenizer.ggml.merges": ["t t"]}, "", r"merges has 't t', no pair"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "", r"names a token twice"),
        ({"tokenizer.ggml.add_bos_token": True}, "tokenizer.ggml.bos_token_id", r"asks for a bos token"),
        ({}, "tokenizer.ggml.merges", r"no metadata tokenizer\.ggml\.merges"),
    ],
)
def test_damaged_metadata_is_refused_with_file_and_key(
    tmp_path: Path, changes: Metadata, without: str, said: str
) -> None:
    """The library below would panic, or make another tokenizer without a word."""
    changes = changes | ({"tokenizer.ggml.eos_token_id": 1} if "tokenizer.ggml.tokens" in changes else {})
    with pytest.raises(ModelFileError, match=rf"tiny\.gguf.*{said}"):
        build(tmp_path, changes, without)
