"""A tiktoken file as a tokenizer: lines of a token's bytes in base64, and its rank.

Knows the `tiktoken` library, which the extra `hf` brings. Such a file does not say how text is split
before it is encoded, nor which special tokens there are: the first goes by the file's name, the second
come from tokenizer_config.json. Knows no model.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, override

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.base_tokenizer import ModelTokenizer, SpecialIds

_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NUMBERS: Final = {"qwen": r"\p{N}"}
"""How digits go together, by the start of the file's name; else up to three do, as in Llama 3."""


def is_tiktoken_file(path: Path) -> bool:
    """Says whether a file is of this kind: SentencePiece models have the same name, and are binary."""
    with path.open("rb") as file:
        first = file.readline(1024).split()
    return len(first) == 2 and first[1].isdigit()  # noqa: PLR2004 - a token and its rank


class TiktokenTokenizer(ModelTokenizer):
    """tiktoken's own encoder."""

    def __init__(
        self,
        path: Path,
        added: Mapping[str, int],
        *,
        special_names: Mapping[str, str | None],
        stops: tuple[int, ...] = (),
        chat_template: str | None = None,
    ) -> None:
        """`added`: the special tokens and their ids.

        Raises: ModelFileError for a damaged file; UnsupportedModelError without the library.
        """
        ranks = _ranks(path)
        self._spellings = {rank: token for token, rank in ranks.items()}
        self._special = dict(added)
        self._special_spellings = {token_id: text for text, token_id in added.items()}
        self._encoding = _encoding(path, ranks, self._special)
        tokens = [""] * (max([*self._spellings, *self._special_spellings]) + 1)
        for token_id, token in self._spellings.items():
            tokens[token_id] = token.decode(errors="replace")
        for token_id, text in self._special_spellings.items():
            tokens[token_id] = text
        ids = {name: self._special.get(token) if token else None for name, token in special_names.items()}
        super().__init__(
            tokens, special_ids=SpecialIds(**ids, stops=stops), chat_template=chat_template, path=str(path)
        )

    @override
    def tokenize(self, text: str) -> list[int]:
        ids = self.tokenize_rendered(text)
        return ids if self.bos is None else [self.bos, *ids]

    @override
    def tokenize_rendered(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all", disallowed_special=())

    @override
    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        shown = [
            self.token_bytes(token_id)
            for token_id in tokens
            if not (skip_special_tokens and token_id in self._special_spellings)
        ]
        return b"".join(shown).decode(errors="replace")

    @override
    def token_bytes(self, token_id: int) -> bytes:
        special = self._special_spellings.get(token_id)
        return self._spellings.get(token_id, b"") if special is None else special.encode()


def _ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ModelFileError(
                f"{path}: line {number} is {line[:40]!r}, no token in base64 and its rank; fetch it again"
            ) from error
    if not ranks:
        raise ModelFileError(f"{path} has no tokens; fetch it again")
    return ranks


def _encoding(path: Path, ranks: dict[bytes, int], special: dict[str, int]) -> Any:  # Any: untyped parts
    try:
        from tiktoken import Encoding
    except ImportError as error:
        raise UnsupportedModelError(
            f"{path} is a tiktoken file, which needs the library: pip install 'megallm[hf]'"
        ) from error
    numbers = next((found for start, found in _NUMBERS.items() if path.name.startswith(start)), r"\p{N}{1,3}")
    return Encoding(
        path.name, pat_str=_SPLIT.format(numbers=numbers), mergeable_ranks=ranks, special_tokens=special
    )
