"""Prompts of a completions request as token ids, and their texts."""

from collections.abc import Callable
from typing import Any

from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.errors import RequestError

type PromptField = str | list[int | str | list[int]]

LONG_TEXT = 20_000
"""Characters from which on a text is tokenised off the loop."""


def prompts_of(field: PromptField) -> list[str | list[int]]:
    """Gives the prompts of a request: one or several, of one kind.

    Raises: RequestError naming the place.
    """
    if isinstance(field, str):
        return [field]
    if not field:
        raise RequestError("prompt is an empty list; give at least one prompt", param="prompt")
    kind = type(field[0])
    for place, item in enumerate(field):
        if type(item) is not kind:
            raise RequestError(
                f"prompt[{place}] is of another kind than prompt[0]; give texts, token ids, or lists of token"
                " ids, one kind throughout",
                param=f"prompt[{place}]",
            )
    if kind is int:
        return [[item for item in field if isinstance(item, int)]]
    return [item for item in field if not isinstance(item, int)]


class TextEncoder:
    """Makes token ids of texts as the tokenizer does: with one bos where it puts one, else with none.

    An end of sequence that the tokenizer puts behind a text is left out: the text goes on.
    """

    def __init__(self, tokenizer: TokenizerAdapter) -> None:
        self._encode = _encoder_of(tokenizer.wrapped)
        self._bos, self._eod = tokenizer.bos, tokenizer.eod
        probe = self._encode("a")
        self._begins = self._bos is not None and probe[:1] == [self._bos]
        self._ends = self._eod is not None and len(probe) > 1 and probe[-1] == self._eod

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Gives the ids of a text. `begins`: it is the beginning of a sequence, which may want a bos.

        A bos that the text spells out is not doubled.
        Raises: RequestError when the tokenizer can't take the text.
        """
        try:
            ids = list(self._encode(text))
        except Exception as error:
            raise RequestError("the tokenizer can't take the text") from error
        if self._ends and ids and ids[-1] == self._eod:
            ids.pop()
        if not self._begins:
            return ids
        num_bos = 0
        while num_bos < len(ids) and ids[num_bos] == self._bos:
            num_bos += 1
        num_wanted = 1 if begins else num_bos - 1
        return ids[num_bos - num_wanted :]


def _encoder_of(wrapped: Any) -> Callable[[str], list[int]]:  # Any: either interface of TokenizerAdapter
    tokenize = getattr(wrapped, "tokenize", None)
    if callable(tokenize) and callable(getattr(wrapped, "detokenize", None)):
        return wrapped.tokenize
    return wrapped.encode
