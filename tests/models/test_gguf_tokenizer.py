"""Tokenizers out of GGUF metadata."""

from pathlib import Path

import pytest

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.base_tokenizer import ModelTokenizer
from megallm.models.gguf_file import GgufFile
from megallm.models.gguf_tokenizer import build_tokenizer
from tests.models.tiny_gguf import Metadata, tiny_metadata, write_gguf


def build(folder: Path, changes: Metadata | None = None, without: str = "") -> ModelTokenizer:
    """Builds the tokenizer of a file whose metadata is changed."""
    metadata = tiny_metadata() | (changes or {})
    metadata.pop(without, None)
    return build_tokenizer(GgufFile(write_gguf(folder / "tiny.gguf", metadata, {})))


def pieces(tokenizer: ModelTokenizer, text: str) -> list[str]:
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
    ("rule", "wanted"),
    [
        ("llama-bpe", ["Ġ", "1", "2", "3", "4", "Ġthe", "Ċ"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4", "Ġthe", "Ċ"]),
    ],
)
def test_the_rules_of_llama_3_and_qwen_split_text(tmp_path: Path, rule: str, wanted: list[str]) -> None:
    """Their vocabularies were made with these cuts; with others the ids are not the model's."""
    assert pieces(build(tmp_path, {"tokenizer.ggml.pre": rule}), " 1234 the\n") == wanted


def test_qwen_s_digits_never_go_together_and_llama_3_s_do_by_three(tmp_path: Path) -> None:
    """A merge of two digits is in this vocabulary: only one of the rules lets it happen."""
    metadata = tiny_metadata()
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    kinds = [3] * 3 + [1] * (len(tokens) - 4) + [4]
    changes: Metadata = {
        "tokenizer.ggml.tokens": [*map(str, tokens), "12"],
        "tokenizer.ggml.merges": [*map(str, merges), "1 2"],
        "tokenizer.ggml.token_type": [*kinds, 1],
    }
    assert pieces(build(tmp_path, changes | {"tokenizer.ggml.pre": "llama-bpe"}), "1234") == ["12", "3", "4"]
    assert pieces(build(tmp_path, changes | {"tokenizer.ggml.pre": "qwen2"}), "1234") == ["1", "2", "3", "4"]


PIECES: Metadata = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581", "t", "h", "e", "th", "he", "the", "\u2581the", "\u2581t",
    ],
    "tokenizer.ggml.scores": [0.0] * 259 + [-9.0, -8.0, -7.0, -6.0, -2.0, -1.0, -3.0, -4.0, -5.0],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 9,
    "tokenizer.ggml.add_bos_token": True,
}  # fmt: skip


def test_pieces_are_merged_by_their_scores_and_unknown_text_goes_by_bytes(tmp_path: Path) -> None:
    """As SentencePiece does: the whole with the best score first, wherever it stands."""
    tokenizer = build(tmp_path, PIECES)
    assert pieces(tokenizer, "the the") == ["<s>", "\u2581the", "\u2581the"]
    ids = tokenizer.tokenize("é")
    assert [tokenizer.vocab[token_id] for token_id in ids] == ["<s>", "\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.detokenize(ids, skip_special_tokens=True) == "é"
    assert b"".join(map(tokenizer.token_bytes, ids[1:])) == " é".encode()


def test_pieces_without_the_blank_in_front_where_the_file_says_so(tmp_path: Path) -> None:
    """A blank too many before every text is another text."""
    tokenizer = build(tmp_path, PIECES | {"tokenizer.ggml.add_space_prefix": False})
    assert pieces(tokenizer, "the") == ["<s>", "the"]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tokenizer.ggml.model", "t5", r"kind 't5', supported are 'gpt2' .* and 'llama'"),
        (
            "tokenizer.ggml.pre",
            "poro",
            r"rule 'poro', supported are \['gpt-2', 'smollm', 'llama-bpe', 'qwen2'\]",
        ),
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
        (PIECES | {"tokenizer.ggml.scores": [1.0]}, "", r"scores has 1 entries, tokenizer\.ggml\.tokens 268"),
        ({}, "tokenizer.ggml.merges", r"no metadata tokenizer\.ggml\.merges"),
    ],
)
def test_damaged_metadata_is_refused_with_file_and_key(
    tmp_path: Path, changes: Metadata, without: str, said: str
) -> None:
    """The library below would panic, or make another tokenizer without a word."""
    if changes.get("tokenizer.ggml.tokens") == ["a", "a"]:
        changes = changes | {"tokenizer.ggml.eos_token_id": 1}
    with pytest.raises(ModelFileError, match=rf"tiny\.gguf.*{said}"):
        build(tmp_path, changes, without)
