"""One request's output as it grows: tokens, text, log-probs, and what its reader gets of them. Pure."""

from collections.abc import Callable, Sequence

from msgspec import structs

from megallm.core_async.messages import (
    Completion,
    Delta,
    Finished,
    ScoredChunk,
    TextSpec,
    TopLogProbs,
    unpack_floats,
    unpack_ints,
)
from megallm.core_async.plan.text import TextStream

type Place = list[tuple[int, float]]
"""(token id, log-prob) of the likeliest tokens at one place, the likeliest first."""


class Output:
    """What one request has generated. The detokeniser is its one owner."""

    __slots__ = (
        "_detokenize",
        "_has_sent_scores",
        "_log_probs",
        "_num_read",
        "_num_sent",
        "_prompt_log_probs",
        "_prompt_top",
        "_top",
        "first_s",
        "is_watched",
        "last_s",
        "may_wait",
        "spec",
        "stream",
        "token_ids",
        "token_times",
    )

    def __init__(self, spec: TextSpec, detokenize: Callable[[Sequence[int]], str]) -> None:
        self.spec = spec
        self.stream: TextStream | None = None
        """The text as it comes, where the request is streamed or has stop words."""
        if spec.is_streamed or spec.stop_words:
            self.stream = TextStream(detokenize, spec.stop_words, keep_stop=spec.keep_stop)
        self.token_times: list[float] | None = [] if spec.tracks_tokens else None
        self.is_watched = self.stream is not None or spec.reports_progress or spec.tracks_tokens
        """Whether something is to be done with each token, beyond keeping it."""
        self.may_wait = (
            spec.is_streamed and not spec.stop_words and not spec.reports_progress and not spec.tracks_tokens
        )
        """Whether that may as well be done with several tokens at once, later."""
        self._detokenize = detokenize
        self.token_ids: list[int] = []
        """Everything generated; the detokeniser appends."""
        self._num_read = 0
        """Tokens whose text was taken."""
        self._num_sent = 0
        self._has_sent_scores = False
        self.first_s: float | None = None
        """Loop time of the first token."""
        self.last_s: float | None = None
        self._log_probs: list[float] = []
        self._top: list[Place] = []
        self._prompt_log_probs: list[float] = []
        self._prompt_top: list[Place] = []

    def add_log_prob(self, log_prob: float, top: Place) -> None:
        """Appends the log-probs that belong to the last token."""
        self._log_probs.append(log_prob)
        self._top.append(top[: self.spec.num_top])

    def add_scores(self, chunk: ScoredChunk) -> None:
        """Appends the log-probs of the next tokens of the prompt."""
        log_probs = unpack_floats(chunk.log_probs)
        self._prompt_log_probs += log_probs
        self._prompt_top += [place[: self.spec.num_top] for place in places_of(chunk.top, len(log_probs))]

    def extend(self, ending: Finished | None) -> str:
        """Gives the text of the new tokens that is safe to show; an id that ends the request has none."""
        assert self.stream is not None, "a request whose text is made at its end"
        start, self._num_read = self._num_read, len(self.token_ids) - self._ends_silently(ending)
        return self.stream.append(self.token_ids[start : self._num_read])

    def delta(self, text: str) -> Delta | None:
        """Gives what a stream shows now: text and the tokens behind it; None when all is held back."""
        assert self.stream is not None, "a request whose text is made at its end"
        num_safe = self.stream.num_safe_tokens
        return self._delta(text, num_safe, None) if text or num_safe > self._num_sent else None

    def last_delta(self, text: str, ending: Finished) -> Delta:
        """Gives the rest of a stream, and why it ended; `text` is what `extend` gave last."""
        text, num_tokens, ending = self._ended(text, ending)
        return self._delta(text, num_tokens, ending)

    def stopped(self, stop_word: str) -> Finished:
        """Gives the ending of a request that a stop word ends, or a failure, before the scheduler knows."""
        spec = self.spec
        return Finished(
            spec.request_id,
            "stop",
            stop_word,
            num_cached_tokens=spec.num_cached_tokens,
            events=spec.events,
            policy_epoch=spec.policy_epoch,
            kv_cache_epoch=spec.kv_cache_epoch,
        )

    def completion(self, ending: Finished) -> Completion:
        """Gives the whole output, and why it ended."""
        if self.stream is None:
            num_tokens = len(self.token_ids)
            text = self._detokenize(self.token_ids[: num_tokens - self._ends_silently(ending)])
        else:
            _, num_tokens, ending = self._ended("", ending)
            text = self.stream.text
        return self._completion(text, num_tokens, ending)

    def failure(self, reason: str) -> Completion | Delta:
        """Gives the end of an output whose text can't be made: its tokens, the text so far, and why."""
        ending = structs.replace(self.stopped(reason), finish_reason="error")
        if self.spec.is_streamed:
            return Delta(
                text="",
                token_ids=[],
                finish_reason="error",
                stop_reason=reason,
                request_id=self.spec.request_id,
                ending=ending,
            )
        return self._completion("" if self.stream is None else self.stream.text, len(self.token_ids), ending)

    def _completion(self, text: str, num_tokens: int, ending: Finished) -> Completion:
        wants = self.spec.wants_log_probs
        return Completion(
            request_id=ending.request_id,
            text=text,
            token_ids=self.token_ids[:num_tokens],
            finish_reason=ending.finish_reason,
            stop_reason=ending.stop_reason,
            num_cached_tokens=ending.num_cached_tokens,
            first_token_s=self.first_s,
            last_token_s=self.last_s,
            log_probs=self._log_probs[:num_tokens] if wants else None,
            top=self._top[:num_tokens] if wants else None,
            prompt_log_probs=self._prompt_log_probs if wants else None,
            prompt_top=self._prompt_top if wants else None,
            num_preemptions=ending.num_preemptions,
            events=ending.events,
            token_times=None if self.token_times is None else self.token_times[:num_tokens],
            policy_epoch=ending.policy_epoch,
            kv_cache_epoch=ending.kv_cache_epoch,
        )

    def _ended(self, text: str, ending: Finished) -> tuple[str, int, Finished]:
        """Gives the last text, how many tokens belong to the output, and the ending.

        A stop word that the last text completes is what ended it.
        """
        assert self.stream is not None, "a request whose text is made at its end"
        text += self.stream.finish()
        if self.stream.stop is None:
            return text, len(self.token_ids), ending
        stopped = structs.replace(ending, finish_reason="stop", stop_reason=self.stream.stop)
        return text, self.stream.num_kept_tokens, stopped

    def _delta(self, text: str, num_tokens: int, ending: Finished | None) -> Delta:
        start, self._num_sent = self._num_sent, max(num_tokens, self._num_sent)
        wants = self.spec.wants_log_probs
        has_scores = bool(self._prompt_log_probs) and not self._has_sent_scores
        self._has_sent_scores = True
        return Delta(
            text=text,
            token_ids=self.token_ids[start : self._num_sent],
            log_probs=self._log_probs[start : self._num_sent] if wants else None,
            top_n_logprobs=[by_text(place, self._detokenize) for place in self._top[start : self._num_sent]]
            if wants and self.spec.num_top
            else None,
            finish_reason=None if ending is None else ending.finish_reason,
            stop_reason=None if ending is None else ending.stop_reason,
            request_id=self.spec.request_id,
            top=self._top[start : self._num_sent] if wants and self.spec.num_top else None,
            prompt_log_probs=self._prompt_log_probs if has_scores else None,
            prompt_top=self._prompt_top if has_scores else None,
            ending=ending,
        )

    def _ends_silently(self, ending: Finished | None) -> bool:
        """Whether the last token is the id that ended the request, and is to be left out of the text."""
        return (
            ending is not None
            and not self.spec.keep_stop
            and ending.finish_reason == "stop"
            and isinstance(ending.stop_reason, int)
        )


def places_of(top: TopLogProbs | None, num_places: int) -> list[Place]:
    """Gives a table of likeliest tokens as one list a place; None: there is nothing at any of them."""
    if top is None:
        no_place: Place = []
        return [no_place] * num_places
    pairs = list(zip(unpack_ints(top.ids), unpack_floats(top.log_probs), strict=True))
    return [pairs[start : start + top.num_top] for start in range(0, len(pairs), top.num_top)]


def by_text(place: Place, detokenize: Callable[[Sequence[int]], str]) -> dict[str, float]:
    """Gives the log-probs of a place by the tokens' text; of tokens with one text the likeliest counts."""
    texts: dict[str, float] = {}
    for token, log_prob in place:
        texts.setdefault(detokenize([token]), log_prob)
    return texts
