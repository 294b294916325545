"""The demo model's tokenizer, against transformers' reading of the same file."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megallm.core_async.errors import InvalidRequestError
from megallm.models.gguf_file import GgufFile
from megallm.models.gguf_tokenizer import build_tokenizer
from megallm.models.load import find_file, open_checkpoint
from megallm.models.tokenizer import ByteLevelTokenizer
from tests.models.tiny_gguf import tiny_metadata, write_gguf

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parent / "reference" / "smollm2_tokens.json").read_text()
)
CASES: list[tuple[str, list[int]]] = [(case["text"], case["ids"]) for case in REFERENCE["cases"]]


@pytest.fixture(scope="module")
def tokenizer() -> ByteLevelTokenizer:
    """Gives the demo model's tokenizer, without its model."""
    tokenizer = open_checkpoint(find_file("smollm2-135m")).tokenizer()
    assert isinstance(tokenizer, ByteLevelTokenizer)
    return tokenizer


def test_ids_equal_transformers_for_every_text(tokenizer: ByteLevelTokenizer) -> None:
    """A prompt in other ids than the model was trained on gives worse answers and no error."""
    for text, ids in CASES:
        assert tokenizer.tokenize(text) == ids, text


def test_texts_come_back_from_their_ids(tokenizer: ByteLevelTokenizer) -> None:
    """Byte-level BPE loses nothing; a round trip that does is a decoder's fault."""
    for text, ids in CASES:
        assert tokenizer.detokenize(ids) == text
        assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


def test_part_of_a_character_decodes_to_a_replacement_and_keeps_its_bytes(
    tokenizer: ByteLevelTokenizer,
) -> None:
    """A stream is cut anywhere; whoever joins the bytes gets the character back."""
    ids = tokenizer.tokenize("👩‍👩‍👧")
    assert "\ufffd" in tokenizer.detokenize(ids[:1])
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "👩‍👩‍👧"


def test_special_tokens_in_text_are_taken_as_such_and_left_out_on_request(
    tokenizer: ByteLevelTokenizer,
) -> None:
    """As Hugging Face's tokenizers do, so that prompts rendered elsewhere work."""
    ids = tokenizer.tokenize("a<|im_end|>b")
    assert ids[1] == tokenizer.eod == 2
    assert tokenizer.detokenize(ids) == "a<|im_end|>b"
    assert tokenizer.detokenize(ids, skip_special_tokens=True) == "ab"


def test_offsets_name_the_character_each_token_starts_in(tokenizer: ByteLevelTokenizer) -> None:
    """Log-probability displays cut the text at these places."""
    text = "the 漢 👍<|im_end|> end"
    ids = tokenizer.tokenize(text)
    offsets = tokenizer.offsets(ids, text)
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    for index, token_id in enumerate(ids):
        whole = tokenizer.token_bytes(token_id).decode(errors="ignore")
        assert text[offsets[index] :].startswith(whole)
    assert text[offsets[-1] :] == " end"


def test_it_answers_to_megatron_s_names(tokenizer: ByteLevelTokenizer) -> None:
    """Engines and data loaders of megatron look these up."""
    assert (tokenizer.bos, tokenizer.bos_id) == (1, 1)
    assert (tokenizer.eod, tokenizer.eos, tokenizer.eos_id) == (2, 2, 2)
    assert (tokenizer.pad, tokenizer.pad_id, tokenizer.unk) == (2, 2, 0)
    assert tokenizer.vocab_size == len(tokenizer.vocab) == len(tokenizer.inv_vocab) == 49_152
    assert tokenizer.vocab[1] == tokenizer.inv_vocab[1] == "<|im_start|>"
    assert tokenizer.unique_identifiers["tokenizer_path"].endswith(".gguf")


def test_conversations_equal_transformers(tokenizer: ByteLevelTokenizer) -> None:
    """The template is the model's manners: one newline off and it answers another question."""
    for chat in REFERENCE["chats"]:
        ids = tokenizer.apply_chat_template(
            chat["messages"], add_generation_prompt=chat["add_generation_prompt"]
        )
        assert ids == chat["ids"]
        text = tokenizer.apply_chat_template(
            chat["messages"], tokenize=False, add_generation_prompt=chat["add_generation_prompt"]
        )
        assert text == tokenizer.detokenize(ids)


def test_a_template_of_the_caller_s_sees_the_special_tokens_and_its_options(
    tokenizer: ByteLevelTokenizer,
) -> None:
    """Templates of other models rely on both."""
    text = tokenizer.apply_chat_template(
        [], "{{ bos_token }}|{{ eos_token }}|{{ enable_thinking }}", tokenize=False, enable_thinking=True
    )
    assert text == "<|im_start|>|<|im_end|>|True"


def test_without_a_template_the_error_says_what_to_pass(tmp_path: Path) -> None:
    """Base models have none."""
    base = build_tokenizer(GgufFile(write_gguf(tmp_path / "base.gguf", tiny_metadata(), {})))
    with pytest.raises(InvalidRequestError, match=r"base\.gguf has no chat template; pass chat_template"):
        base.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_ids_that_are_not_there_are_none(tmp_path: Path) -> None:
    """The engine takes none for 'never stop'; an id of 0 would be a token."""
    base = build_tokenizer(GgufFile(write_gguf(tmp_path / "base.gguf", tiny_metadata(), {})))
    assert (base.bos, base.eod, base.pad, base.unk) == (1, 2, None, None)


def test_a_pickled_copy_behaves_the_same(tokenizer: ByteLevelTokenizer) -> None:
    """Server processes get it that way."""
    copy: ByteLevelTokenizer = pickle.loads(pickle.dumps(tokenizer))  # noqa: S301 - our own bytes
    for text, ids in CASES:
        assert copy.tokenize(text) == ids
    messages = REFERENCE["chats"][0]["messages"]
    assert copy.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)


def test_threads_share_it(tokenizer: ByteLevelTokenizer) -> None:
    """Facades tokenise off the loop, several at once."""

    def check(case: tuple[str, list[int]]) -> bool:
        text, ids = case
        return tokenizer.tokenize(text) == ids and tokenizer.detokenize(ids) == text

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(check, CASES * 10))
