"""The tokenizer of a Hugging Face folder, whichever of its files describes it, and its chat template.

Knows the names of files and settings; each kind of vocabulary has its own module. Knows no model.
"""

from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from megallm.core_async.errors import ModelFileError
from megallm.models.base_tokenizer import ModelTokenizer, SpecialIds
from megallm.models.sentencepiece_tokenizer import SentencePieceTokenizer
from megallm.models.settings_file import Settings
from megallm.models.tiktoken_tokenizer import TiktokenTokenizer, is_tiktoken_file
from megallm.models.tokenizer import ByteLevelTokenizer, PieceTokenizer

_FAST: Final = "tokenizer.json"
_PIECES: Final = "tokenizer.model"
_CONFIG: Final = "tokenizer_config.json"
_GENERATION: Final = "generation_config.json"
_TEMPLATE: Final = "chat_template.jinja"
_NAMES: Final = ("bos", "eos", "pad", "unk")


class _Decoder(Struct):
    """The part of tokenizer.json that says how tokens become text."""

    type: str = ""
    decoders: list["_Decoder"] = []

    def is_byte_level(self) -> bool:
        return self.type == "ByteLevel" or any(part.is_byte_level() for part in self.decoders)


class _Outline(Struct):
    """The part of tokenizer.json that is read here; the library reads the rest."""

    decoder: _Decoder | None = None


def build_tokenizer(folder: Path, *, model_vocab_size: int | None = None) -> ModelTokenizer:
    """Builds the tokenizer of a folder, or the one that a tokenizer's file describes.

    `model_vocab_size`: rows of the model's embedding, where a model comes with it.

    Raises: ModelFileError when there is none, it can't be read, or it has ids that the model has not;
    UnsupportedModelError when a library that it needs is not installed.
    """
    path = _file_of(folder)
    home = path.parent
    settings = Settings.read(home / _CONFIG) if (home / _CONFIG).exists() else Settings(home / _CONFIG, {})
    template = _chat_template(home, settings)
    added = _added_tokens(settings)
    stops = _stops(home)
    if path.suffix == ".json":
        tokenizer = _fast(path, settings, template, stops)
    elif is_tiktoken_file(path):
        tokenizer = TiktokenTokenizer(
            path, added, special_names=_special_names(settings), stops=stops, chat_template=template
        )
    else:
        tokenizer = SentencePieceTokenizer(
            path, added, special_names=_special_names(settings), stops=stops, chat_template=template
        )
    if model_vocab_size is not None and tokenizer.vocab_size > model_vocab_size:
        raise ModelFileError(
            f"{path} has {tokenizer.vocab_size:,} tokens, vocab_size in config.json is {model_vocab_size:,}; "
            "tokenizer and model don't belong together"
        )
    return tokenizer


def _file_of(folder: Path) -> Path:
    if folder.is_file():
        return folder
    candidates = [folder / _FAST, folder / _PIECES, *sorted(folder.glob("*.tiktoken"))]
    for path in candidates:
        if path.exists():
            return path
    raise ModelFileError(
        f"{folder} has no {_FAST}, {_PIECES} or *.tiktoken; fetch the folder again, or name the folder or "
        "file of its tokenizer with load_model(tokenizer=...)"
    )


def _fast(path: Path, settings: Settings, template: str | None, stops: tuple[int, ...]) -> ModelTokenizer:
    try:
        content = path.read_bytes()
        outline = msgspec.json.decode(content, type=_Outline)
        backend = Tokenizer.from_buffer(content)
    except OSError as error:
        raise ModelFileError(f"{path} can't be read: {error}; fetch it again") from error
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelFileError(f"{path} is no tokenizer: {error}; fetch it again") from error
    ids: dict[str, int | None] = {
        name: None if token is None else backend.token_to_id(token)
        for name, token in _special_names(settings).items()
    }
    is_byte_level = outline.decoder is not None and outline.decoder.is_byte_level()
    kind = ByteLevelTokenizer if is_byte_level else PieceTokenizer
    return kind(backend, special_ids=SpecialIds(**ids, stops=stops), chat_template=template, path=str(path))


def _special_names(settings: Settings) -> dict[str, str | None]:
    """Gives the named special tokens, as text; a name may stand for nothing."""
    return {name: _text_of(settings.values.get(f"{name}_token")) for name in _NAMES}


def _stops(home: Path) -> tuple[int, ...]:
    """Gives the ids that a model's makers have answers end at, beside the tokenizer's eos."""
    if not (home / _GENERATION).exists():
        return ()
    found = Settings.read(home / _GENERATION).values.get("eos_token_id")
    listed: list[Any] = found if isinstance(found, list) else [found]
    return tuple(token_id for token_id in listed if type(token_id) is int)


def _added_tokens(settings: Settings) -> dict[str, int]:
    """Gives the tokens that the config adds to the vocabulary, by their text."""
    listed: dict[str, Any] = settings.value_or("added_tokens_decoder", {})
    return {
        text: int(token_id)
        for token_id, described in listed.items()
        if token_id.isdecimal() and (text := _text_of(described)) is not None
    }


def _text_of(token: Any) -> str | None:  # Any: JSON, a text or an object with its content
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _chat_template(home: Path, settings: Settings) -> str | None:
    """Gives the template: a file of its own comes first, then the config's, the default among several."""
    if (home / _TEMPLATE).exists():
        return (home / _TEMPLATE).read_text(encoding="utf-8")
    found = settings.values.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
