"""Tokenizers of the `tokenizers` library, whose vocabularies spell bytes in one of two ways.

Knows that library; knows no file format.
"""

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Final, override

from tokenizers import Tokenizer

from megallm.models.base_tokenizer import ModelTokenizer, SpecialIds


class BackendTokenizer(ModelTokenizer):
    """A tokenizer over the library's object, which it takes over."""

    def __init__(
        self, backend: Tokenizer, *, special_ids: SpecialIds, chat_template: str | None = None, path: str = ""
    ) -> None:
        ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        tokens = [""] * (max(ids.values(), default=-1) + 1)
        for token, token_id in ids.items():
            tokens[token_id] = token
        super().__init__(tokens, special_ids=special_ids, chat_template=chat_template, path=path)
        self._backend = backend
        self._added = {
            token_id: added.content for token_id, added in backend.get_added_tokens_decoder().items()
        }

    def to_json(self) -> str:
        """Gives the library's description of it; special ids and chat template are no part of that."""
        return self._backend.to_str()

    @override
    def tokenize(self, text: str) -> list[int]:
        return self._backend.encode(text).ids

    @override
    def tokenize_rendered(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    @override
    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    @override
    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        return self._bytes_of(self._tokens[token_id])

    @abstractmethod
    def _bytes_of(self, token: str) -> bytes:
        """Gives the bytes of a token that was not added to the vocabulary."""


class ByteLevelTokenizer(BackendTokenizer):
    """One whose tokens are spelled with a letter a byte, as GPT-2's."""

    @override
    def _bytes_of(self, token: str) -> bytes:
        if not _BYTE_OF_SYMBOL.keys() >= set(token):
            return token.encode()  # spelled outside the byte alphabet, so it is no part of a text's bytes
        return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in token)


class PieceTokenizer(BackendTokenizer):
    """One whose tokens are pieces of text with a mark for the blank, as SentencePiece's."""

    @override
    def _bytes_of(self, token: str) -> bytes:
        return piece_bytes(token)


def piece_bytes(piece: str) -> bytes:
    """Gives the bytes of a SentencePiece token: `<0x0A>` is one byte, U+2581 stands for a blank."""
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("\u2581", " ").encode()


_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")


def _symbols() -> dict[str, int]:
    """Gives the byte each symbol of a byte-level vocabulary stands for (GPT-2's table).

    Printable Latin-1 stands for itself; the other bytes follow in order from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_SYMBOL: Final = _symbols()
