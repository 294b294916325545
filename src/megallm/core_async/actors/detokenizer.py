"""The detokeniser: owner of every running request's text. Turns tokens into what readers get."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol

from anyio.abc import TaskStatus

from megallm.core_async.errors import RequestFailedError
from megallm.core_async.kit.actor import Actor, Address
from megallm.core_async.kit.outbox import Outbox, Outboxes
from megallm.core_async.messages import (
    Completion,
    Delta,
    Finished,
    Progress,
    RequestId,
    TokenBatch,
    unpack_floats,
    unpack_ints,
)
from megallm.core_async.plan.output import Output, places_of
from megallm.core_async.plan.pace import Pace
from megallm.core_async.step_times import StepTimes
from megallm.core_async.transport.routes import Routes

type Parcel = Delta | Completion | Progress
"""What an outbox carries."""


class OutputActor(Protocol):
    """Who hears what each step gave: a detokeniser, or what passes it on to one elsewhere."""

    @property
    def address(self) -> Address[TokenBatch]: ...

    async def run(self, *, task_status: TaskStatus[None]) -> None: ...


class Detokenizer(Actor[TokenBatch]):
    """Owns the output of each request that has a token; the only writer of the outboxes.

    A stop word ends a request here, before the scheduler knows: its outbox key is ended early, and
    the scheduler drops the request at the next step.
    """

    name: ClassVar[str] = "detokenizer"
    capacity: ClassVar[int] = 64
    """One batch a step; it falls behind only while the loop itself does."""

    def __init__(
        self,
        detokenize: Callable[[Sequence[int]], str],
        outboxes: Outboxes[Parcel],
        times: StepTimes,
        routes: Routes | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`routes`: to whom rows of other owners are passed on; None where there can be none.

        `pace`: which streams wait for more; whoever gives one calls `give_waiting` when no step comes.
        """
        super().__init__()
        self._routes = routes
        self._pace = pace
        self._detokenize = detokenize
        self._outboxes = outboxes
        self._times = times
        self._outputs: dict[RequestId, Output] = {}

    async def handle(self, message: TokenBatch) -> None:
        """Extends the outputs by one step's tokens and closes those that ended."""
        began = time.perf_counter()
        if self._routes is not None:
            message = self._routes.split(message)
        for spec in message.started:
            self._begin(Output(spec, self._detokenize))
        for chunk in message.scored:
            if (output := self._outputs.get(chunk.request_id)) is not None:
                output.add_scores(chunk)
        endings = {finished.request_id: finished for finished in message.finished}
        self._add_tokens(message, endings)
        for ending in message.finished:
            self._finish(ending)
        if self._pace is not None:
            self._show_late(self._pace.take_late())
        self._times.add_post(time.perf_counter() - began)

    def give_waiting(self) -> None:
        """Gives the readers what waits for tokens of further steps."""
        if self._pace is not None:
            self._show_late(self._pace.take_all())

    def _begin(self, output: Output) -> None:
        self._outputs[output.spec.request_id] = output
        if self._pace is not None and output.may_wait:
            self._pace.begin(output.spec.request_id)

    def _forget(self, request_id: RequestId) -> None:
        self._outputs.pop(request_id, None)
        if self._pace is not None:
            self._pace.end(request_id)

    def _add_tokens(self, batch: TokenBatch, endings: dict[RequestId, Finished]) -> None:
        tokens, time_s, pace = unpack_ints(batch.tokens), batch.time_s, self._pace
        if batch.log_probs:
            self._add_log_probs(batch)
        progress: Counter[Outbox[Parcel]] = Counter()
        for request_id, token in zip(batch.requests, tokens, strict=True):
            output = self._outputs.get(request_id)
            if output is None:
                continue
            output.token_ids.append(token)
            output.last_s = time_s
            if output.first_s is None:
                output.first_s = time_s
            if not output.is_watched:
                continue
            ending = endings.get(request_id)
            if pace is None or ending is not None or not pace.defers(request_id):
                self._watch(output, ending, progress)
        for outbox, num_tokens in progress.items():
            outbox.put(Progress(num_tokens))

    def _add_log_probs(self, batch: TokenBatch) -> None:
        """Appends the log-probs of a batch, where a request wants them."""
        log_probs = unpack_floats(batch.log_probs)
        places = places_of(batch.top, len(log_probs))
        for request_id, log_prob, place in zip(batch.requests, log_probs, places, strict=True):
            output = self._outputs.get(request_id)
            if output is not None and output.spec.wants_log_probs:
                output.add_log_prob(log_prob, place)

    def _watch(self, output: Output, ending: Finished | None, progress: "Counter[Outbox[Parcel]]") -> None:
        """Does what a request wants done with each token: progress, stop words, deltas."""
        outbox = self._outboxes.find(output.spec.request_id)
        if outbox is None:
            return
        if output.spec.reports_progress:
            progress[outbox] += 1
        if output.token_times is not None and output.last_s is not None:
            output.token_times.append(output.last_s)
        self._show(output, outbox, ending)

    def _show(self, output: Output, outbox: Outbox[Parcel], ending: Finished | None) -> None:
        """Makes the text of the new tokens, where it is wanted as they come; a stop word in it ends all."""
        if output.stream is None:
            return
        try:
            text = output.extend(ending)
            if output.stream.stop is not None:
                self._close(output, outbox, text, output.stopped(output.stream.stop))
                self._outboxes.end_early(output.spec.request_id)
            elif output.spec.is_streamed and ending is not None:
                self._close(output, outbox, text, ending)
                self._outboxes.end(output.spec.request_id)
            elif output.spec.is_streamed and (delta := output.delta(text)) is not None:
                outbox.put(delta)
        except RequestFailedError as error:
            self._fail(output, outbox, error)

    def _show_late(self, requests: Iterable[RequestId]) -> None:
        """Shows what streams have that waited for more."""
        for request_id in requests:
            if (outbox := self._outboxes.find(request_id)) is not None:
                self._show(self._outputs[request_id], outbox, None)

    def _finish(self, ending: Finished) -> None:
        """Closes a request that ended, unless its last token has closed it."""
        output = self._outputs.get(ending.request_id)
        outbox = self._outboxes.find(ending.request_id)
        if output is not None and outbox is not None:
            try:
                self._close(output, outbox, "" if output.stream is None else output.extend(ending), ending)
            except RequestFailedError as error:
                self._fail(output, outbox, error)
        self._forget(ending.request_id)
        self._outboxes.end(ending.request_id)

    def _close(self, output: Output, outbox: Outbox[Parcel], text: str, ending: Finished) -> None:
        """Gives the reader the last of an output; the key is ended after that, lest a failure be missed."""
        outbox.put(output.last_delta(text, ending) if output.spec.is_streamed else output.completion(ending))
        self._forget(output.spec.request_id)

    def _fail(self, output: Output, outbox: Outbox[Parcel], error: RequestFailedError) -> None:
        """Ends a request whose text can't be made; the scheduler drops it at the next step."""
        outbox.put(output.failure(str(error)))
        self._forget(output.spec.request_id)
        self._outboxes.end_early(output.spec.request_id)
