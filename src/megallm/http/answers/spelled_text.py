"""Text with its special tokens spelled out, for requests that set `skip_special_tokens` to false.

The engine's text leaves them out; here it is made anew from the tokens that the engine gives.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from msgspec import structs

from megallm.core_async.messages import Completion, Delta
from megallm.core_async.plan.text import TextStream
from megallm.core_async.tokenizers import TokenizerAdapter

type Detokenize = Callable[[list[int]], str]


def spelling_detokenizer(tokenizer: TokenizerAdapter) -> Detokenize:
    """Gives what makes text of ids, special tokens included, where the tokenizer can do that."""
    wrapped: Any = tokenizer.wrapped  # Any: either interface of TokenizerAdapter
    is_megatrons = callable(getattr(wrapped, "tokenize", None)) and callable(
        getattr(wrapped, "detokenize", None)
    )
    decode = wrapped.detokenize if is_megatrons else wrapped.decode
    if "skip_special_tokens" not in inspect.signature(decode).parameters:
        return tokenizer.detokenize
    return functools.partial(decode, skip_special_tokens=False)


class SpelledText:
    """The text of one choice. A stop word may be a special token's spelling: the text ends there."""

    def __init__(self, detokenize: Detokenize, stop_words: tuple[str, ...], *, keep_stop: bool) -> None:
        self._stream = TextStream(detokenize, stop_words, keep_stop=keep_stop)
        self._keep_stop = keep_stop
        self._num_given = 0
        self.has_ended = False
        """Whether the last of it was given."""

    def of_delta(self, delta: Delta) -> Delta:
        """Gives a delta with its text spelled out; the one that completes a stop word is the last."""
        is_last = delta.finish_reason is not None
        text = self._append(delta.token_ids, delta.stop_reason, is_last=is_last)
        stop = self._stream.stop
        self.has_ended = is_last or stop is not None
        if stop is None:
            self._num_given += len(delta.token_ids)
            return structs.replace(delta, text=text)
        num_kept = max(self._stream.num_kept_tokens - self._num_given, 0)
        return structs.replace(
            delta,
            text=text,
            finish_reason="stop",
            stop_reason=stop,
            token_ids=delta.token_ids[:num_kept],
            log_probs=_first(delta.log_probs, num_kept),
            top=_first(delta.top, num_kept),
        )

    def of_completion(self, completion: Completion) -> Completion:
        """Gives a completion with its text spelled out."""
        text = self._append(completion.token_ids, completion.stop_reason, is_last=True)
        stop = self._stream.stop
        if stop is None:
            return structs.replace(completion, text=text)
        num_kept = self._stream.num_kept_tokens
        return structs.replace(
            completion,
            text=text,
            finish_reason="stop",
            stop_reason=stop,
            token_ids=completion.token_ids[:num_kept],
            log_probs=_first(completion.log_probs, num_kept),
            top=_first(completion.top, num_kept),
        )

    def _append(self, token_ids: list[int], stop_reason: int | str | None, *, is_last: bool) -> str:
        """Gives the text of the next tokens; an id that ended the request has none."""
        ends_silently = is_last and not self._keep_stop and isinstance(stop_reason, int)
        text = self._stream.append(token_ids[:-1] if ends_silently else token_ids)
        return text + self._stream.finish() if is_last else text


def _first[T](items: list[T] | None, num_items: int) -> list[T] | None:
    return None if items is None else items[:num_items]
