"""The tokenizer that a GGUF file describes.

Knows llama.cpp's names for the parts of a tokenizer; supports byte-level BPE ("gpt2") and SentencePiece's
pieces with scores ("llama"). Knows no model.
"""

from enum import IntEnum
from typing import Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.base_tokenizer import ModelTokenizer, SpecialIds
from megallm.models.gguf_file import GgufFile
from megallm.models.tokenizer import ByteLevelTokenizer, PieceTokenizer

_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Final = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _WORDS.format(numbers=r"\p{N}{1,3}"),
    "qwen2": _WORDS.format(numbers=r"\p{N}"),
}
"""How each supported pre-tokenizer cuts text, by llama.cpp's name of it; None is GPT-2's own way.

"smollm" takes every digit apart before the rest is split, so that blanks in front of a number stay
together: "a  1" is `a`, two blanks in one token, `1`.
"""
_BLANK: Final = "\u2581"
_UNKNOWN: Final = "<unk>"


class _Kind(IntEnum):
    """What a token is, as the file's `token_type` column says."""

    CONTROL = 3
    USER_DEFINED = 4


def build_tokenizer(file: GgufFile) -> ModelTokenizer:
    """Builds the tokenizer.

    Raises: UnsupportedModelError for a kind that is not built here, ModelFileError for a damaged file.
    """
    model = file.value("tokenizer.ggml.model", str)
    if model not in _KINDS:
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer of the kind {model!r}, supported are 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece); build the tokenizer yourself and pass it to MegatronLLM"
        )
    tokens = file.list_of("tokenizer.ggml.tokens", str)
    special_ids = _special_ids(file, len(tokens))
    tokenizer, make_backend = _KINDS[model]
    backend = make_backend(file, _vocabulary(file, tokens))
    _add_tokens(backend, file, tokens)
    _add_ends(backend, file, tokens, special_ids)
    return tokenizer(
        backend,
        special_ids=special_ids,
        chat_template=file.value_or("tokenizer.chat_template", "") or None,
        path=str(file.path),
    )


def _vocabulary(file: GgufFile, tokens: list[str]) -> dict[str, int]:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelFileError(f"{file.path}: tokenizer.ggml.tokens names a token twice; the file is damaged")
    return vocab


def _byte_level(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    merges = [_pair(file, merge, vocab) for merge in file.list_of("tokenizer.ggml.merges", str)]
    name = file.value("tokenizer.ggml.pre", str)
    # Llama 3's vocabulary has words that no merges lead to
    model = models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=name == "llama-bpe")
    backend = Tokenizer(model)
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(file, name)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    """Gives the tokenizer of pieces: the pair whose whole has the best score is merged first."""
    scores = file.value("tokenizer.ggml.scores", list)
    if len(scores) != len(vocab):
        raise ModelFileError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores):,} entries, tokenizer.ggml.tokens "
            f"{len(vocab):,}; the file is damaged"
        )
    pairs = [
        (-float(scores[token_id]), cut, (token[:cut], token[cut:]))
        for token, token_id in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges = [pair for _, _, pair in sorted(pairs)]
    model = models.BPE(vocab=vocab, merges=merges, unk_token=_UNKNOWN, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", _BLANK)
    ends: list[decoders.Decoder] = []
    if file.value_or("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), backend.normalizer])
        ends = [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return backend


_KINDS: Final = {"gpt2": (ByteLevelTokenizer, _byte_level), "llama": (PieceTokenizer, _pieces)}
"""By llama.cpp's name of the kind."""


def _add_tokens(backend: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    kinds = file.list_of("tokenizer.ggml.token_type", int)
    if len(kinds) != len(tokens):
        raise ModelFileError(
            f"{file.path}: tokenizer.ggml.token_type has {len(kinds):,} entries, tokenizer.ggml.tokens "
            f"{len(tokens):,}; the file is damaged"
        )
    backend.add_special_tokens(_added(tokens, kinds, _Kind.CONTROL))
    backend.add_tokens(_added(tokens, kinds, _Kind.USER_DEFINED))


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


def _pre_tokenizer(file: GgufFile, name: str) -> pre_tokenizers.PreTokenizer:
    if name not in _SPLITS:
        raise UnsupportedModelError(
            f"{file.path} splits text by the rule {name!r}, supported are {list(_SPLITS)}; "
            "build the tokenizer yourself and pass it to MegatronLLM"
        )
    words = _SPLITS[name]
    prefix = file.value_or("tokenizer.ggml.add_space_prefix", False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=words is None)
    if words is not None:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), byte_level])
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


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
