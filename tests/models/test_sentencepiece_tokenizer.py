"""SentencePiece models, trained here on a few lines."""
# sentencepiece is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megallm.core_async.errors import ModelFileError
from megallm.models.sentencepiece_tokenizer import SentencePieceTokenizer

NAMES: dict[str, str | None] = {"bos": None, "eos": None, "pad": None, "unk": "<unk>"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gives a model of BPE with bytes for what it does not know, as Llama 2's is."""
    written = io.BytesIO()
    lines = ["the cat sat on the mat", "a cat and a hat", "the hat sat"] * 5
    trainer: Any = sentencepiece.SentencePieceTrainer  # Any: untyped
    trainer.Train(
        sentence_iterator=iter(lines), model_writer=written, vocab_size=300, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    path.write_bytes(written.getvalue())
    return path


def test_ids_are_the_library_s_with_a_bos_before_them(path: Path) -> None:
    """Llama 2 and Mistral were trained with it; `tokenize` is what puts it there."""
    reference: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))  # Any: untyped
    tokenizer = SentencePieceTokenizer(path, {}, special_names=NAMES)
    for text in ("the cat sat", "a  é\n漢", ""):
        ids = reference.EncodeAsIds(text)
        assert tokenizer.tokenize(text) == [1, *ids]
        assert tokenizer.tokenize_rendered(text) == ids
        assert tokenizer.detokenize(ids) == reference.DecodeIds(ids)
    assert (tokenizer.bos, tokenizer.eod, tokenizer.unk) == (1, 2, 0)


def test_special_tokens_in_text_are_taken_as_such(path: Path) -> None:
    """The library itself takes `</s>` for four characters, and so would every chat template's marks be."""
    size = SentencePieceTokenizer(path, {}, special_names=NAMES).vocab_size
    names = NAMES | {"eos": "<end>"}
    tokenizer = SentencePieceTokenizer(path, {"<end>": size + 1}, special_names=names)
    ids = tokenizer.tokenize_rendered("the</s>cat<end>")
    assert [token_id for token_id in ids if token_id in (2, size + 1)] == [2, size + 1]
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.eod == size + 1
    assert tokenizer.detokenize(ids) == "the</s>cat<end>"
    assert tokenizer.detokenize([*ids, 10**6], skip_special_tokens=True) == "thecat"


def test_bytes_of_tokens_join_to_the_text(path: Path) -> None:
    """Streams and grammars are cut by them."""
    tokenizer = SentencePieceTokenizer(path, {}, special_names=NAMES)
    ids = tokenizer.tokenize_rendered("the é漢")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " the é漢"
    assert tokenizer.token_bytes(2) == b"</s>"


def test_a_damaged_file_is_refused_with_its_path(tmp_path: Path) -> None:
    """The library's own words name no file."""
    (tmp_path / "tokenizer.model").write_bytes(b"\x00\x01no model")
    with pytest.raises(ModelFileError, match=r"tokenizer\.model is no SentencePiece model"):
        SentencePieceTokenizer(tmp_path / "tokenizer.model", {}, special_names=NAMES)
