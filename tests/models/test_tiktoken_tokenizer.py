"""tiktoken's files: bytes, two merges and special tokens."""

import base64
from pathlib import Path

import pytest

from megallm.core_async.errors import ModelFileError
from megallm.models.tiktoken_tokenizer import TiktokenTokenizer, is_tiktoken_file

TOKENS = [*(bytes([byte]) for byte in range(256)), b"12", b"th", b"the"]
ADDED = {"<s>": 300, "<end>": 301}
NAMES: dict[str, str | None] = {"bos": "<s>", "eos": "<end>", "pad": None, "unk": None}


def write(path: Path) -> Path:
    """Writes the file."""
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(TOKENS)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> TiktokenTokenizer:
    """Gives the tokenizer of a file called as Llama 3's."""
    return TiktokenTokenizer(write(tmp_path / "tokenizer.model"), ADDED, special_names=NAMES)


def test_texts_and_special_tokens_come_back(tokenizer: TiktokenTokenizer) -> None:
    """With the bos that such models are trained with."""
    ids = tokenizer.tokenize("the é<end>")
    assert ids == [300, 258, 32, 0xC3, 0xA9, 301]
    assert tokenizer.detokenize(ids) == "<s>the é<end>"
    assert tokenizer.detokenize([*ids, 280, 999], skip_special_tokens=True) == "the é"
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad, tokenizer.vocab_size) == (300, 301, None, 302)
    assert tokenizer.token_bytes(301) == b"<end>"
    assert tokenizer.vocab[258] == "the"


def test_digits_go_together_as_the_file_s_family_has_it(tmp_path: Path) -> None:
    """Qwen takes every digit alone, Llama 3 up to three together."""
    qwen = TiktokenTokenizer(write(tmp_path / "qwen.tiktoken"), ADDED, special_names=NAMES)
    llama = TiktokenTokenizer(write(tmp_path / "tokenizer.model"), ADDED, special_names=NAMES)
    assert qwen.tokenize_rendered("12") == [ord("1"), ord("2")]
    assert llama.tokenize_rendered("12") == [256]


def test_the_file_is_told_from_sentencepiece_s(tmp_path: Path) -> None:
    """Both are called tokenizer.model."""
    assert is_tiktoken_file(write(tmp_path / "tokenizer.model"))
    (tmp_path / "binary.model").write_bytes(b"\n\x0e\n\x05<unk>")
    assert not is_tiktoken_file(tmp_path / "binary.model")


@pytest.mark.parametrize(
    ("content", "said"), [("YQ== 0\n!!! 1\n", "line 2 is b'!!! 1'"), ("\n", "has no tokens")]
)
def test_a_damaged_file_is_refused_with_the_line(tmp_path: Path, content: str, said: str) -> None:
    """A hundred thousand lines are not looked through by eye."""
    (tmp_path / "a.tiktoken").write_text(content, encoding="utf-8")
    with pytest.raises(ModelFileError, match=rf"a\.tiktoken.*{said}"):
        TiktokenTokenizer(tmp_path / "a.tiktoken", {}, special_names=NAMES)
