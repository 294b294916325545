"""How single tokens are shown: their exact bytes, and a spelling that no two of them share by accident.

A token may be a part of a character, so its text alone says less than its bytes. Knows the kinds of
tokenizers that users bring.
"""

import json
import re
from functools import lru_cache
from typing import Any, Final, Protocol, runtime_checkable

from megallm.core_async.tokenizers import TokenizerAdapter

MAX_KEPT: Final = 65_536
"""Tokens whose bytes are kept: a few megabytes."""

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START: Final = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""


@runtime_checkable
class TokenBytes(Protocol):
    """A tokenizer that says which bytes each of its tokens stands for."""

    def token_bytes(self, token_id: int) -> bytes:
        """Gives the bytes of a token, part of a text's UTF-8."""
        ...


class Vocabulary:
    """The tokens of one tokenizer, one by one. Special tokens are shown as they are spelled."""

    def __init__(self, tokenizer: TokenizerAdapter) -> None:
        wrapped: object = tokenizer.wrapped
        if isinstance(wrapped, TokenBytes):
            find = wrapped.token_bytes
        else:
            backend = _backend_of(wrapped)
            find = _Spelled(tokenizer).token_bytes if backend is None else _Fast(backend).token_bytes
        self._detokenize = tokenizer.detokenize
        self._vocab_size = tokenizer.vocab_size
        self._find = find
        self.bytes_of = lru_cache(MAX_KEPT)(self._bytes_of)
        """Gives the bytes of a token; none for an id that the model has and the tokenizer has not."""
        self.spelling = lru_cache(MAX_KEPT)(self._spelling)
        """Gives a token as text; one that is no whole text as `bytes:` and its bytes in hexadecimal."""

        self.is_shown = lru_cache(MAX_KEPT)(self._is_shown)
        """Whether a token is part of the text: special tokens are left out of it."""

    def _is_shown(self, token_id: int) -> bool:
        return bool(self._detokenize([token_id])) if 0 <= token_id < self._vocab_size else False

    def _bytes_of(self, token_id: int) -> bytes:
        return self._find(token_id) if 0 <= token_id < self._vocab_size else b""

    def _spelling(self, token_id: int) -> str:
        encoded = self.bytes_of(token_id)
        try:
            return encoded.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded)


class _Spelled:
    """Tokens of a tokenizer that can only detokenise: those that are no whole text have lost their bytes."""

    def __init__(self, tokenizer: TokenizerAdapter) -> None:
        self._tokenizer = tokenizer

    def token_bytes(self, token_id: int) -> bytes:
        """Gives the bytes of a token's text."""
        return self._tokenizer.detokenize([token_id]).encode()


class _Fast:
    """Tokens of Hugging Face's `tokenizers`, from their entries in the vocabulary."""

    def __init__(self, backend: Any) -> None:  # Any: a tokenizers.Tokenizer, which has no types
        self._backend = backend
        self._added = {
            token_id: added.content for token_id, added in backend.get_added_tokens_decoder().items()
        }
        decoder: str = json.dumps(json.loads(backend.to_str()).get("decoder"))
        self._byte_of = byte_alphabet() if '"ByteLevel"' in decoder else None

    def token_bytes(self, token_id: int) -> bytes:
        """Gives the bytes that an entry stands for."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str = self._backend.id_to_token(token_id) or ""
        if self._byte_of is not None and self._byte_of.keys() >= set(token):
            return bytes(self._byte_of[symbol] for symbol in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_WORD_START, " ").encode()


def byte_alphabet() -> dict[str, int]:
    """Gives the byte that each symbol of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _backend_of(tokenizer: object) -> Any | None:  # Any: the same
    """Finds the `tokenizers` object of a fast Hugging Face tokenizer, given itself or wrapped by megatron."""
    inner: object = getattr(tokenizer, "_tokenizer", None)
    for candidate in (tokenizer, inner, getattr(inner, "tokenizer", None)):
        backend: object = getattr(candidate, "backend_tokenizer", None)
        if backend is not None:
            return backend
    return None
