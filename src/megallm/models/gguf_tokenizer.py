"""The tokenizer that a GGUF file describes.

Knows llama.cpp's names for the parts of a tokenizer; supports byte-level BPE. Knows no model.
"""

from enum import IntEnum
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.gguf_file import GgufFile
from megallm.models.tokenizer import ByteLevelTokenizer, SpecialIds

_SPLIT_DIGITS: Final = {"gpt-2": False, "smollm": True}
"""How each supported pre-tokenizer treats digits, by llama.cpp's name of it.

"smollm" takes every digit apart before the rest is split, so that blanks in front of a number stay
together: "a  1" is `a`, two blanks in one token, `1`.
"""


class _Kind(IntEnum):
    """What a token is, as the file's `token_type` column says."""

    CONTROL = 3
    USER_DEFINED = 4


def build_tokenizer(file: GgufFile) -> ByteLevelTokenizer:
    """Builds the tokenizer.

    Raises: UnsupportedModelError for a kind that is not built here, ModelFileError for a damaged file.
    """
    model = file.value("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer of the kind {model!r}, supported is 'gpt2' (byte-level BPE); "
            "build the tokenizer yourself and pass it to MegatronLLM"
        )
    tokens = file.list_of("tokenizer.ggml.tokens", str)
    special_ids = _special_ids(file, len(tokens))
    return ByteLevelTokenizer(
        _backend(file, tokens, special_ids),
        special_ids=special_ids,
        chat_template=file.value_or("tokenizer.chat_template", "") or None,
        path=str(file.path),
    )


def _backend(file: GgufFile, tokens: list[str], special_ids: SpecialIds) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelFileError(f"{file.path}: tokenizer.ggml.tokens names a token twice; the file is damaged")
    merges = [_pair(file, merge, vocab) for merge in file.list_of("tokenizer.ggml.merges", str)]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    backend.pre_tokenizer = _pre_tokenizer(file)
    backend.decoder = decoders.ByteLevel()
    kinds = file.list_of("tokenizer.ggml.token_type", int)
    if len(kinds) != len(tokens):
        raise ModelFileError(
            f"{file.path}: tokenizer.ggml.token_type has {len(kinds):,} entries, tokenizer.ggml.tokens "
            f"{len(tokens):,}; the file is damaged"
        )
    backend.add_special_tokens(_added(tokens, kinds, _Kind.CONTROL))
    backend.add_tokens(_added(tokens, kinds, _Kind.USER_DEFINED))
    _add_ends(backend, file, tokens, special_ids)
    return backend


def _added(tokens: list[str], kinds: list[int], wanted: _Kind) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=wanted is _Kind.CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == wanted
    ]


def _pair(file: GgufFile, merge: str, vocab: dict[str, int]) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    if first not in vocab or second not in vocab or first + second not in vocab:
        raise ModelFileError(
            f"{file.path}: tokenizer.ggml.merges has {merge!r}, no pair of tokens that make a token; "
            "the file is damaged"
        )
    return first, second


def _pre_tokenizer(file: GgufFile) -> pre_tokenizers.PreTokenizer:
    name = file.value("tokenizer.ggml.pre", str)
    if name not in _SPLIT_DIGITS:
        raise UnsupportedModelError(
            f"{file.path} splits text by the rule {name!r}, supported are {list(_SPLIT_DIGITS)}; "
            "build the tokenizer yourself and pass it to MegatronLLM"
        )
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=file.value_or("tokenizer.ggml.add_space_prefix", False)
    )
    if not _SPLIT_DIGITS[name]:
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _add_ends(backend: Tokenizer, file: GgufFile, tokens: list[str], special_ids: SpecialIds) -> None:
    """Has the tokenizer put a bos before each text and an eos behind it, where the file asks for it."""
    template = ["$A"]
    named: list[tuple[str, int]] = []
    if file.value_or("tokenizer.ggml.add_bos_token", False):
        bos = _needed(file, "bos", special_ids.bos)
        template.insert(0, tokens[bos])
        named.append((tokens[bos], bos))
    if file.value_or("tokenizer.ggml.add_eos_token", False):
        eos = _needed(file, "eos", special_ids.eos)
        template.append(tokens[eos])
        named.append((tokens[eos], eos))
    if named:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)


def _needed(file: GgufFile, name: str, token_id: int | None) -> int:
    if token_id is None:
        raise ModelFileError(f"{file.path} asks for a {name} token and names none; the file is damaged")
    return token_id


def _special_ids(file: GgufFile, num_tokens: int) -> SpecialIds:
    found: list[int | None] = []
    for name in ("bos", "eos", "padding", "unknown"):
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = file.value(key, int) if key in file.metadata else None
        if token_id is not None and not 0 <= token_id < num_tokens:
            raise ModelFileError(
                f"{file.path}: metadata {key} is {token_id}, the vocabulary has {num_tokens:,} tokens; "
                "the file is damaged"
            )
        found.append(token_id)
    bos, eos, pad, unknown = found
    return SpecialIds(bos=bos, eos=eos, pad=pad, unk=unknown)
