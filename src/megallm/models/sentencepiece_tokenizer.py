"""A SentencePiece model file as a tokenizer.

Knows the `sentencepiece` library, which the extra `hf` brings; knows no model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, override

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.base_tokenizer import ModelTokenizer, SpecialIds
from megallm.models.split_text import SpecialSplitter
from megallm.models.tokenizer import piece_bytes


class SentencePieceTokenizer(ModelTokenizer):
    """SentencePiece's own encoder, with special tokens taken as such where a text spells them out."""

    def __init__(
        self,
        path: Path,
        added: Mapping[str, int],
        *,
        special_names: Mapping[str, str | None],
        stops: tuple[int, ...] = (),
        chat_template: str | None = None,
    ) -> None:
        """`added`: tokens beyond the model file's, and their ids.

        Raises: ModelFileError for a file that is no such model; UnsupportedModelError without the library.
        """
        self._model: Any = _read(path)  # Any: the library has no types
        pieces: list[str] = [
            self._model.IdToPiece(token_id) for token_id in range(self._model.GetPieceSize())
        ]
        controls = {
            token_id
            for token_id in range(len(pieces))
            if self._model.IsControl(token_id) or self._model.IsUnknown(token_id)
        }
        self._special = {pieces[token_id]: token_id for token_id in controls} | dict(added)
        tokens = pieces + [""] * (max([-1, *added.values()]) + 1 - len(pieces))
        for token, token_id in added.items():
            tokens[token_id] = token
        self._special_spellings = {token_id: token for token, token_id in self._special.items()}
        self._splitter = SpecialSplitter(self._special)
        by_text = {token: token_id for token_id, token in enumerate(tokens)}
        ids = {name: by_text.get(token) if token else None for name, token in special_names.items()}
        ids["bos"] = ids["bos"] if ids["bos"] is not None else _id_or_none(self._model.bos_id())
        ids["eos"] = ids["eos"] if ids["eos"] is not None else _id_or_none(self._model.eos_id())
        super().__init__(
            tokens, special_ids=SpecialIds(**ids, stops=stops), chat_template=chat_template, path=str(path)
        )

    @override
    def tokenize(self, text: str) -> list[int]:
        ids = self.tokenize_rendered(text)
        return ids if self.bos is None else [self.bos, *ids]

    @override
    def tokenize_rendered(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._splitter.parts(text):
            ids += [part] if isinstance(part, int) else self._model.EncodeAsIds(part)
        return ids

    @override
    def detokenize(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        texts: list[str] = []
        run: list[int] = []
        for token_id in tokens:
            if token_id in self._special_spellings:
                texts.append(self._model.DecodeIds(run))
                run = []
                texts.append("" if skip_special_tokens else self._special_spellings[token_id])
            elif 0 <= token_id < self._model.GetPieceSize():
                run.append(token_id)
        texts.append(self._model.DecodeIds(run))
        return "".join(texts)

    @override
    def token_bytes(self, token_id: int) -> bytes:
        spelling = self._special_spellings.get(token_id)
        return piece_bytes(self._tokens[token_id]) if spelling is None else spelling.encode()


def _read(path: Path) -> Any:  # Any: see above
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise UnsupportedModelError(
            f"{path} is a SentencePiece model, which needs the library: pip install 'megallm[hf]'"
        ) from error
    try:
        return SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ModelFileError(f"{path} is no SentencePiece model: {error}; fetch it again") from error


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None
