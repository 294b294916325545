"""Log-probabilities as the two APIs show them: parallel lists, or one object a token."""

import math

from megallm.core_async.plan.output import Place
from megallm.http.answers.vocabulary import Vocabulary

LEAST = -9999.0
"""What stands for minus infinity, which JSON has not."""


def finite(log_prob: float) -> float:
    """Gives a number that JSON has."""
    return log_prob if math.isfinite(log_prob) else LEAST


class LogProbColumns:
    """The log-probs of one completion: tokens and numbers side by side, each token at its place in the text.

    `take` hands over what was added since, so that a stream's parts joined are the whole.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._num_characters = 0
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._log_probs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_first(self, token_id: int) -> None:
        """Adds a prompt's first token, which nothing comes before."""
        self._add(token_id, None, None)

    def add(self, token_ids: list[int], log_probs: list[float], places: list[Place] | None) -> None:
        """Adds tokens. The chosen one is among its rivals; of tokens spelled alike the likeliest counts."""
        no_place: Place = []
        for at, (token_id, log_prob) in enumerate(zip(token_ids, log_probs, strict=True)):
            rivals: dict[str, float] = {}
            for rival, rival_log_prob in [*(places[at] if places else no_place), (token_id, log_prob)]:
                rivals.setdefault(self._vocabulary.spelling(rival), finite(rival_log_prob))
            self._add(token_id, finite(log_prob), rivals)

    def take(self) -> dict[str, object]:
        """Gives what was added since the last call."""
        columns: dict[str, object] = {
            "tokens": self._tokens,
            "token_logprobs": self._log_probs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._clear()
        return columns

    def _add(self, token_id: int, log_prob: float | None, rivals: dict[str, float] | None) -> None:
        encoded = self._vocabulary.bytes_of(token_id)
        starts_inside = bool(encoded) and _continues(encoded[0])
        self._tokens.append(self._vocabulary.spelling(token_id))
        self._log_probs.append(log_prob)
        self._top.append(rivals)
        self._offsets.append(max(0, self._num_characters - starts_inside))
        if self._vocabulary.is_shown(token_id):
            self._num_characters += sum(not _continues(byte) for byte in encoded)


def chat_entries(
    vocabulary: Vocabulary,
    token_ids: list[int],
    log_probs: list[float],
    places: list[Place] | None,
    num_top: int,
) -> list[dict[str, object]]:
    """Gives one object a token, with its bytes and its `num_top` likeliest rivals."""
    no_place: Place = []
    entries: list[dict[str, object]] = []
    for at, (token_id, log_prob) in enumerate(zip(token_ids, log_probs, strict=True)):
        place = places[at][:num_top] if places else no_place
        top = [_chat_entry(vocabulary, rival, rival_log_prob) for rival, rival_log_prob in place]
        entries.append({**_chat_entry(vocabulary, token_id, log_prob), "top_logprobs": top})
    return entries


def _chat_entry(vocabulary: Vocabulary, token_id: int, log_prob: float) -> dict[str, object]:
    encoded = vocabulary.bytes_of(token_id)
    return {
        "token": vocabulary.spelling(token_id),
        "logprob": finite(log_prob),
        "bytes": list(encoded),
    }


def _continues(byte: int) -> bool:
    """Tells whether a byte is a later one of a UTF-8 character."""
    return byte & 0xC0 == 0x80  # noqa: PLR2004 - the bits of UTF-8
