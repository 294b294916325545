"""Plans in flight, and what their results mean. Pure."""

from array import array

from megallm.core_async.messages import (
    Finished,
    Floats,
    Ints,
    RequestId,
    ScoredChunk,
    StepResult,
    TextSpec,
    TokenBatch,
    TopLogProbs,
    pack_floats,
    pack_ints,
    unpack_floats,
    unpack_ints,
)
from megallm.core_async.plan.request import Request


class InFlight:
    """A plan whose result is to come, and whom the result concerns, in batch order."""

    __slots__ = ("complete", "firsts", "has_stale", "last", "number", "sampled", "scored")

    def __init__(self, number: int) -> None:
        self.number = number
        self.sampled: list[Request] = []
        self.last: list[Request] = []
        """Those of them whose token is the last that they may have."""
        self.has_stale = False
        """Whether one of them has ended before the result came."""
        self.firsts: list[Request] = []
        """Those of whom the detokeniser has not heard."""
        self.complete: list[Request] = []
        """Those that end with this step although they sample nothing: prompts that are only scored."""
        self.scored: list[tuple[Request, int]] = []
        """Whose prompt is scored, and how many of its tokens."""

    def compute(self, request: Request) -> bool:
        """Notes that the step computes a chunk of the request; says whether that yields a token."""
        if request.num_missing:
            return False
        if request.num_tokens >= request.max_tokens:
            self.complete.append(request)
            self._introduce(request)
            return False
        request.num_tokens += 1
        request.is_decoding = True
        self.sampled.append(request)
        if request.num_tokens >= request.max_tokens:
            self.last.append(request)
        self._introduce(request)
        return True

    def score(self, request: Request, start: int, length: int) -> array[int]:
        """Gives a chunk's targets and counts them as reported; nothing where no log-prob is wanted of it."""
        if request.num_scored >= request.num_prompt or start + 1 >= request.num_prompt:
            return array("i")
        targets = request.targets(start, length)
        num_wanted = len(targets) - targets.count(-1)
        request.num_scored += num_wanted
        self.scored.append((request, num_wanted))
        self._introduce(request)
        return targets

    def scores_of(self, result: StepResult) -> list[ScoredChunk]:
        """Gives each request its part of the scores."""
        chunks: list[ScoredChunk] = []
        place = 0
        for request, num_wanted in self.scored:
            end = place + num_wanted
            top = None if result.score_top is None else _places(result.score_top, list(range(place, end)))
            chunks.append(ScoredChunk(request.request_id, Floats(result.scores[4 * place : 4 * end]), top))
            place = end
        return chunks

    def _introduce(self, request: Request) -> None:
        if not request.has_started:
            request.has_started = True
            self.firsts.append(request)


class Outcome:
    """What one result meant, gathered until the reply is written."""

    def __init__(self) -> None:
        self.started: list[TextSpec] = []
        self.requests: list[RequestId] = []
        self.tokens = Ints(b"")
        self.log_probs = Floats(b"")
        self.top: TopLogProbs | None = None
        self.scored: list[ScoredChunk] = []
        self.finished: list[Finished] = []

    def take(self, step: InFlight, result: StepResult) -> None:
        """Takes over a result's columns, as they are."""
        self.started = [request.started_text() for request in step.firsts if request.finish_reason is None]
        self.requests = [request.request_id for request in step.sampled]
        self.tokens, self.log_probs, self.top = result.tokens, result.log_probs, result.top
        self.scored = step.scores_of(result) if step.scored else []

    def keep(self, kept: list[int]) -> None:
        """Drops the tokens of all but some places: of requests that had ended before the result came."""
        tokens = unpack_ints(self.tokens)
        self.tokens = pack_ints([tokens[index] for index in kept])
        if self.log_probs:
            log_probs = unpack_floats(self.log_probs)
            self.log_probs = pack_floats([log_probs[index] for index in kept])
        if self.top is not None:
            self.top = _places(self.top, kept)
        self.requests = [self.requests[index] for index in kept]

    def batch(self, time_s: float) -> TokenBatch:
        """Gives the message for the detokeniser; `time_s`: when the result came."""
        return TokenBatch(
            started=self.started,
            requests=self.requests,
            tokens=self.tokens,
            log_probs=self.log_probs,
            finished=self.finished,
            time_s=time_s,
            top=self.top,
            scored=self.scored,
        )


def _places(top: TopLogProbs, places: list[int]) -> TopLogProbs:
    """Gives some places of a table of likeliest tokens."""
    width = 4 * top.num_top
    return TopLogProbs(
        top.num_top,
        Ints(b"".join(top.ids[place * width : (place + 1) * width] for place in places)),
        Floats(b"".join(top.log_probs[place * width : (place + 1) * width] for place in places)),
    )
