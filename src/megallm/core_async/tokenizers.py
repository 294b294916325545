"""Makes one interface of the tokenizers that users bring: megatron's, or Hugging Face's as it is.

Imports neither; looks at what the object can do.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from megallm.core_async.errors import InvalidRequestError, RequestFailedError


class TokenizerAdapter:
    """The engine's view of a user's tokenizer; implements `protocols.Tokenizer`.

    megatron's interface is `tokenize(text)` and `detokenize(ids)`, and `skip_special_tokens` where
    the tokenizer takes it; Hugging Face's is `encode` and `decode`.
    """

    def __init__(self, tokenizer: Any) -> None:  # any object with one of the two interfaces
        self.wrapped = tokenizer
        self._encode, self._decode = _functions(tokenizer)
        self.bos: int | None = _token_id(tokenizer, "bos", "bos_id", "bos_token_id")
        self.eod: int | None = _token_id(tokenizer, "eod", "eos_id", "eos_token_id")
        self.end_ids: tuple[int, ...] = _end_ids(tokenizer, self.eod)
        """Ids that end an answer: eod, and the checkpoint's others where the tokenizer knows them."""

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows."""
        return int(self.wrapped.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """Gives the ids of a text, without any leading bos: as upstream, which then adds the one asked for.

        Raises: InvalidRequestError when the tokenizer raises, as many do for half a surrogate pair.
        """
        try:
            ids = list(self._encode(text))
        except Exception as error:
            raise InvalidRequestError(f"the tokenizer can't take the prompt: {_said(error)}") from error
        num_bos = 0
        while self.bos is not None and num_bos < len(ids) and ids[num_bos] == self.bos:
            num_bos += 1
        return ids[num_bos:]

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Gives the text of ids, special tokens left out where the tokenizer can do that.

        Raises: RequestFailedError when the tokenizer raises.
        """
        try:
            return self._decode(list(tokens))
        except Exception as error:
            raise RequestFailedError(f"the tokenizer can't give its text: {_said(error)}") from error


def _end_ids(tokenizer: object, eod: int | None) -> tuple[int, ...]:
    """Gives what megallm's own tokenizers call `stop_ids`; of another one its eod."""
    of_checkpoint: list[int] = getattr(tokenizer, "stop_ids", [])
    return tuple(of_checkpoint) or (() if eod is None else (eod,))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _functions(tokenizer: Any) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Gives (encode, decode) of either interface.

    Raises: TypeError naming the class and what it lacks.
    """
    if callable(getattr(tokenizer, "tokenize", None)) and callable(getattr(tokenizer, "detokenize", None)):
        detokenize = tokenizer.detokenize
        if _takes(detokenize, "skip_special_tokens"):
            return tokenizer.tokenize, lambda ids: detokenize(ids, skip_special_tokens=True)
        return tokenizer.tokenize, detokenize
    if callable(getattr(tokenizer, "encode", None)) and callable(getattr(tokenizer, "decode", None)):
        encode, decode = tokenizer.encode, tokenizer.decode
        return lambda text: encode(text, add_special_tokens=False), lambda ids: decode(
            ids, skip_special_tokens=True
        )
    raise TypeError(
        f"tokenizer is a {type(tokenizer).__name__} without tokenize/detokenize (megatron's interface)"
        " or encode/decode (Hugging Face's); pass one that has either pair"
    )


def _takes(function: Callable[..., object], parameter: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin that does not say
        return False
    return parameter in parameters


def _token_id(tokenizer: object, *names: str) -> int | None:
    """Gives the first of the attributes that is a token id; megatron's raise where they do not exist."""
    for name in names:
        try:
            value = getattr(tokenizer, name, None)
        except (NotImplementedError, KeyError):
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None
