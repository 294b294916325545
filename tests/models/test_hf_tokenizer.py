"""Tokenizers of Hugging Face folders, against transformers where it reads the same files."""
# transformers is partly untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers

from megallm.core_async.errors import ModelFileError
from megallm.models.hf_tokenizer import build_tokenizer
from megallm.models.tokenizer import ByteLevelTokenizer, PieceTokenizer
from tests.models.tiny_hf import VOCAB, change_json, write_tokenizer

MESSAGES = [{"role": "user", "content": "Hi </s>"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Gives a folder of a byte-level tokenizer and its config."""
    write_tokenizer(tmp_path, VOCAB)
    return tmp_path


def test_ids_texts_and_conversations_equal_transformers(folder: Path) -> None:
    """The same folder, read by the library it was made for."""
    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)  # Any: untyped
    ours = build_tokenizer(folder)
    assert isinstance(ours, ByteLevelTokenizer)
    for text in ("", "a b\n", "é漢👍", "x</s>y"):
        ids = ours.tokenize(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.detokenize(ids) == text
    assert (ours.bos, ours.eod, ours.pad, ours.unk) == (1, 2, 0, None)
    rendered = theirs.apply_chat_template(MESSAGES, tokenize=False)
    assert ours.apply_chat_template(MESSAGES, tokenize=False) == rendered


def test_a_template_in_a_file_comes_before_the_config_s(folder: Path) -> None:
    """Newer folders have it there, and an old one beside it may be stale."""
    (folder / "chat_template.jinja").write_text("file: {{ messages[0].content }}", encoding="utf-8")
    assert build_tokenizer(folder).apply_chat_template(MESSAGES, tokenize=False) == "file: Hi </s>"


def test_the_default_among_several_templates_is_taken(folder: Path) -> None:
    """Models with tools have a second one for them."""
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    change_json(folder / "tokenizer_config.json", lambda config: config.update(chat_template=named))
    assert build_tokenizer(folder).chat_template == "plain"
    change_json(folder / "tokenizer_config.json", lambda config: config.update(chat_template=named[:1]))
    assert build_tokenizer(folder).chat_template is None


def test_answers_end_at_every_id_that_the_model_s_makers_name(folder: Path) -> None:
    """Phi-3 ends a turn with another token than its eos; without it an answer runs on to the limit."""
    assert build_tokenizer(folder).stop_ids == [2]
    for found, wanted in (([2, 7, 9], [2, 7, 9]), (7, [2, 7]), (None, [2])):
        content = json.dumps({"eos_token_id": found})
        (folder / "generation_config.json").write_text(content, encoding="utf-8")
        assert build_tokenizer(folder).stop_ids == wanted


def test_a_tokenizer_s_file_alone_is_enough(folder: Path) -> None:
    """Its config beside it is taken where there is one."""
    assert build_tokenizer(folder / "tokenizer.json").eod == 2
    (folder / "tokenizer_config.json").unlink()
    assert build_tokenizer(folder / "tokenizer.json").eod is None


def test_pieces_are_told_from_bytes(tmp_path: Path) -> None:
    """Llama 2 and Gemma spell a blank as U+2581; taken as a byte alphabet every blank would be lost."""
    pieces = ["<unk>", "<0x0A>", "\u2581", "a", "\u2581a"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(tmp_path)
    assert isinstance(tokenizer, PieceTokenizer)
    ids = tokenizer.tokenize("a a\n")
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b"a", b" a", b"\n"]


def test_more_tokens_than_the_model_has_rows_are_refused(folder: Path) -> None:
    """With both files' names."""
    with pytest.raises(
        ModelFileError, match=r"tokenizer\.json has 272 tokens, vocab_size in config\.json is 271"
    ):
        build_tokenizer(folder, model_vocab_size=VOCAB - 1)


@pytest.mark.parametrize("content", ["", "{", '{"model": {"type": "None"}}'])
def test_a_damaged_tokenizer_is_refused_with_its_path(folder: Path, content: str) -> None:
    """The library's own words name no file."""
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is no tokenizer: "):
        build_tokenizer(folder)


def test_a_folder_without_one_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Fine-tunes often come without."""
    with pytest.raises(
        ModelFileError, match=r"has no tokenizer\.json, tokenizer\.model or .*load_model\(tokenizer"
    ):
        build_tokenizer(tmp_path)


def test_a_tiktoken_file_is_found_under_either_name(tmp_path: Path) -> None:
    """Llama 3 calls it tokenizer.model, as SentencePiece's files are called; Qwen *.tiktoken."""
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    config = {"eos_token": "<end>", "added_tokens_decoder": {"256": {"content": "<end>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.model", "qwen.tiktoken"):
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
        tokenizer = build_tokenizer(tmp_path)
        assert type(tokenizer).__name__ == "TiktokenTokenizer"
        assert (tokenizer.eod, tokenizer.vocab_size) == (256, 257)
        (tmp_path / name).unlink()
