"""The detokeniser: owner of every running request's text. Turns tokens into what readers get."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

from megallm.core_async.kit.actor import Actor
from megallm.core_async.kit.outbox import Outbox, Outboxes
from megallm.core_async.messages import (
    Completion,
    Delta,
    Finished,
    Progress,
    RequestId,
    TextSpec,
    TokenBatch,
    unpack_ints,
)
from megallm.core_async.plan.text import TextStream
from megallm.core_async.step_times import StepTimes

type Parcel = Delta | Completion | Progress
"""What an outbox carries."""


class Detokenizer(Actor[TokenBatch]):
    """Owns the text of each request that has a token; the only writer of the outboxes.

    A stop word ends a request here, before the scheduler knows: its outbox key is ended early, and
    the scheduler drops the request at the next step.
    """

    name: ClassVar[str] = "detokenizer"
    capacity: ClassVar[int] = 64
    """One batch a step; it falls behind only while the loop itself does."""

    def __init__(
        self, detokenize: Callable[[Sequence[int]], str], outboxes: Outboxes[Parcel], times: StepTimes
    ) -> None:
        super().__init__()
        self._times = times
        self._detokenize = detokenize
        self._outboxes = outboxes
        self._outputs: dict[RequestId, _Output] = {}

    async def handle(self, message: TokenBatch) -> None:
        """Extends the texts by one step's tokens and closes those that ended."""
        began = time.perf_counter()
        for spec in message.started:
            self._outputs[spec.request_id] = _Output(spec, self._detokenize)
        endings = {finished.request_id: finished for finished in message.finished}
        progress: Counter[Outbox[Parcel]] = Counter()
        for request_id, token in zip(message.requests, unpack_ints(message.tokens), strict=True):
            output = self._outputs.get(request_id)
            if output is None:
                continue
            output.add(token, message.time_s)
            if output.is_watched:
                self._watch(output, endings.get(request_id), progress)
        for finished in message.finished:
            self._finish(finished)
        for outbox, num_tokens in progress.items():
            outbox.put(Progress(num_tokens))
        self._times.add_post(time.perf_counter() - began)

    def _watch(self, output: "_Output", ending: Finished | None, progress: "Counter[Outbox[Parcel]]") -> None:
        """Does what a request wants done with each token: progress, stop words, deltas."""
        request_id = output.spec.request_id
        outbox = self._outboxes.find(request_id)
        if outbox is None:
            return
        if output.spec.reports_progress:
            progress[outbox] += 1
        if output.stream is None:
            return
        text = output.extend(ending)
        if output.stream.stop is not None:
            self._outboxes.end_early(request_id)
            del self._outputs[request_id]
            outbox.put(output.last_parcel(text, Finished(request_id, "stop", output.stream.stop)))
        elif ending is None and output.spec.is_streamed and (delta := output.delta(text)) is not None:
            outbox.put(delta)
        else:
            output.unsent += text

    def _finish(self, finished: Finished) -> None:
        output = self._outputs.pop(finished.request_id, None)
        outbox = self._outboxes.find(finished.request_id)
        self._outboxes.end(finished.request_id)
        if output is None or outbox is None:
            return
        outbox.put(output.last_parcel("", finished))


class _Output:
    """One request's output so far."""

    __slots__ = ("_detokenize", "first_s", "is_watched", "last_s", "num_sent", "spec", "stream", "token_ids", "unsent")

    def __init__(self, spec: TextSpec, detokenize: Callable[[Sequence[int]], str]) -> None:
        self.spec = spec
        self.token_ids: list[int] = []
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.num_sent = 0
        self.unsent = ""
        self._detokenize = detokenize
        self.stream: TextStream | None = None
        if spec.is_streamed or spec.stop_words:
            self.stream = TextStream(detokenize, spec.stop_words, keep_stop=spec.keep_stop)
        self.is_watched = self.stream is not None or spec.reports_progress

    def add(self, token: int, time_s: float) -> None:
        """Appends a token."""
        self.token_ids.append(token)
        if self.first_s is None:
            self.first_s = time_s
        self.last_s = time_s

    def extend(self, ending: Finished | None) -> str:
        """Gives the new text that is safe to show; the id that ends the request has no text of its own."""
        assert self.stream is not None
        if ending is not None and self._ends_silently(ending):
            return ""
        return self.stream.append(self.token_ids[-1:])

    def delta(self, text: str) -> Delta | None:
        """Gives what a stream shows now: text and the tokens behind it; None when all is held back."""
        assert self.stream is not None
        num_kept = self.stream.num_kept_tokens
        if not text and num_kept <= self.num_sent:
            return None
        token_ids = self.token_ids[self.num_sent : num_kept]
        self.num_sent = max(num_kept, self.num_sent)
        return Delta(text, token_ids)

    def last_parcel(self, text: str, ending: Finished) -> Delta | Completion:
        """Gives the whole output, or for a stream the rest of it, and why it ended."""
        token_ids = self.token_ids
        if self.stream is None:
            shown = token_ids[:-1] if self._ends_silently(ending) else token_ids
            whole = self._detokenize(shown)
        else:
            if self.stream.stop is None:
                text += self.stream.finish()
            if self.stream.stop is not None:
                token_ids = token_ids[: self.stream.num_kept_tokens]
                ending = Finished(ending.request_id, "stop", self.stream.stop)
            whole = self.stream.text
        if self.spec.is_streamed:
            rest = token_ids[self.num_sent :]
            return Delta(self.unsent + text, rest, None, None, ending.finish_reason, ending.stop_reason)
        return Completion(
            request_id=ending.request_id,
            text=whole,
            token_ids=token_ids,
            log_probs=[],
            finish_reason=ending.finish_reason,
            stop_reason=ending.stop_reason,
            num_cached_tokens=ending.num_cached_tokens,
            first_token_s=self.first_s,
            last_token_s=self.last_s,
        )

    def _ends_silently(self, ending: Finished) -> bool:
        """Whether the last token is the one that ended the request and is to be left out of the text."""
        return not self.spec.keep_stop and ending.finish_reason == "stop" and isinstance(ending.stop_reason, int)
