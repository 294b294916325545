"""One request's choices on their way through the engine: queued together, read together.

Knows requests, deltas and completions; knows no JSON and no route.
"""

import functools
import time

import anyio
import msgspec
from anyio import to_thread
from msgspec import Struct, structs

from megallm.core_async.actors.detokenizer import Parcel
from megallm.core_async.errors import InvalidRequestError, RequestFailedError
from megallm.core_async.intake import Entry
from megallm.core_async.kit.outbox import Outbox
from megallm.core_async.messages import Completion, Delta, RequestId
from megallm.core_async.streaming import joined
from megallm.http.answers.gathered import Gathered
from megallm.http.answers.outcome import Outcome, queue_s_of
from megallm.http.answers.spelled_text import SpelledText, spelling_detokenizer
from megallm.http.bodies.sampling import RequestParams, for_choices, refused_params
from megallm.http.errors import RequestError
from megallm.http.service import Service
from megallm.http.traffic import Exchange


class Choice(Struct):
    """One output of a request: the prompt it goes on from, and its place in the response."""

    index: int
    prompt_index: int
    entry: Entry

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return self.entry.token_ids


class Asked(Struct, frozen=True):
    """How many tokens a request asks for, and by which field."""

    param: str
    num_tokens: int


async def prepare(
    service: Service,
    exchange: Exchange,
    prompts: list[list[int]],
    params: RequestParams,
    *,
    n: int,
    is_streamed: bool,
    asked: Asked | None,
    interval: int = 1,
    subject: str = "prompt",
    spells_specials: bool = False,
) -> "Generation":
    """Checks the prompts and parameters of a request and makes its choices, `n` a prompt.

    `asked`: the budget that the request itself names; one nobody asked for is fitted into the context.
    `subject`: what errors call the prompt's source, "prompt" or "messages". `spells_specials`: special
    tokens are part of the text.
    Raises: RequestError naming the field.
    """
    _check_context(service, prompts, asked, subject)
    if service.settings.verbose:
        exchange.noted["params"] = msgspec.to_builtins(params, str_keys=True)
    make_call = functools.partial(
        service.intake.prepare,
        [prompt for prompt in prompts for _ in range(n)],
        for_choices(params, n) * len(prompts),
        is_streamed=is_streamed,
    )
    try:
        call = await to_thread.run_sync(make_call) if params.has_grammar else make_call()
    except (ValueError, TypeError, ImportError) as error:
        raise refused_params(error) from error
    choices = [Choice(index, index // n, entry) for index, entry in enumerate(call.entries)]
    for choice in choices:
        entry = choice.entry
        if entry.error is not None:
            raise _refused_prompt(entry.error, choice.prompt_index, len(prompts), subject)
        if entry.request is not None and n > 1:
            entry.request = structs.replace(entry.request, shares_prefix=True)
    spelled: list[SpelledText] | None = None
    if spells_specials:
        words, keep_stop = tuple(params.stop_words), params.detokenize_stop_sequence
        detokenize = spelling_detokenizer(service.tokenizer)
        spelled = [SpelledText(detokenize, words, keep_stop=keep_stop) for _ in choices]
    return Generation(service, exchange, choices, n=n, interval=interval, spelled=spelled)


class Generation:
    """The choices of one request, and what the engine has given of them. Its owner is the request's task."""

    def __init__(
        self,
        service: Service,
        exchange: Exchange,
        choices: list[Choice],
        *,
        n: int,
        interval: int,
        spelled: list[SpelledText] | None,
    ) -> None:
        """`spelled`: the texts of the choices with their special tokens, where those are to be shown."""
        self.choices = choices
        self._outcome = Outcome()
        self.usage = self._outcome.usage
        self._service = service
        self._exchange = exchange
        self._n = n
        self._interval = interval
        self._spelled = spelled
        self._outbox: Outbox[Parcel] | None = None
        self._indexes: dict[RequestId, int] = {}
        self._open = {choice.index for choice in choices}
        self._has_begun = False
        self._began_s = 0.0
        self._held: dict[int, Delta] = {}
        self._gathered = [Gathered() for _ in choices]

    @property
    def has_ended(self) -> bool:
        """Whether every choice has ended."""
        return not self._open

    async def start(self) -> None:
        """Queues the choices. They are aborted when the exchange ends, if not before.

        Raises: EngineBusy, DrainingError, EngineStoppedError, EngineDeadError.
        """
        firsts = self.choices[:: self._n]
        self.usage.prompt_tokens = sum(len(choice.prompt) for choice in firsts)
        self._began_s = anyio.current_time()
        requests = [choice.entry.request for choice in self.choices if choice.entry.request is not None]
        if requests:
            self._indexes = {
                choice.entry.request_id: choice.index
                for choice in self.choices
                if choice.entry.request is not None
            }
            self._outbox = await self._service.submit(self._exchange, requests)
        else:
            self._service.check_open()
        self._exchange.on_close(self._end)
        for choice in firsts:
            budget = choice.entry.request.max_new_tokens if choice.entry.request is not None else 0
            self._service.metrics.add_request(len(choice.prompt), self._n, budget)

    def streamed(self, index: int) -> Completion:
        """Gives the whole output of a choice whose deltas have all come."""
        return self._gathered[index].completion()

    async def complete(self) -> list[Completion]:
        """Waits for all choices, and gives them in order.

        Raises: RequestFailedError; AbortedError, DrainingError, EngineStoppedError, EngineDeadError.
        """
        completions: dict[int, Completion] = {
            choice.index: _nothing_generated(choice)
            for choice in self.choices
            if choice.entry.request is None
        }
        while len(completions) < len(self.choices):
            assert self._outbox is not None, "choices wait, and none was queued"
            for parcel in await self._outbox.take():
                if isinstance(parcel, Completion):
                    index = self._indexes[parcel.request_id]
                    completions[index] = (
                        parcel if self._spelled is None else self._spelled[index].of_completion(parcel)
                    )
        for index in range(len(self.choices)):
            self._note_completion(index, completions[index])
        return [completions[index] for index in range(len(self.choices))]

    async def next_deltas(self) -> list[tuple[int, Delta]]:
        """Waits for news, and gives them with the indexes of their choices, one delta a choice.

        Raises: as `complete`, once what came before was given.
        """
        deltas: dict[int, Delta] = {}
        if not self._has_begun:
            self._has_begun = True
            without = [choice for choice in self.choices if choice.entry.request is None]
            deltas = {choice.index: _nothing_to_stream(choice) for choice in without}
        while not deltas:
            assert self._outbox is not None, "no choice was queued, and another delta is waited for"
            for parcel in await self._outbox.take():
                if isinstance(parcel, Delta):
                    self._hold(self._indexes[parcel.request_id], parcel)
            deltas = self._ripe()
        for index, delta in deltas.items():
            self._note_delta(index, delta)
        if not self._open and self._outbox is not None:
            self._outbox.close()
        return sorted(deltas.items())

    def _hold(self, index: int, delta: Delta) -> None:
        """Adds a delta to what is to be sent of its choice."""
        if self._spelled is not None:
            if self._spelled[index].has_ended:
                return  # a stop word that the engine does not see has ended it
            delta = self._spelled[index].of_delta(delta)
        before = self._held.get(index)
        self._held[index] = delta if before is None else joined(before, delta)

    def _ripe(self) -> dict[int, Delta]:
        """Takes what is long enough to be sent, or the last of its choice."""
        if self._interval == 1:
            ripe, self._held = self._held, {}
            return ripe
        ripe = {
            index: delta
            for index, delta in self._held.items()
            if delta.finish_reason is not None or len(delta.token_ids) >= self._interval
        }
        for index in ripe:
            del self._held[index]
        return ripe

    def _note_completion(self, index: int, completion: Completion) -> None:
        elapsed_s = anyio.current_time() - self._began_s
        num = len(completion.token_ids)
        first_s, last_s = completion.first_token_s, completion.last_token_s
        if first_s is not None and last_s is not None:  # the engine's clock: only spans mean anything
            self._note_first_token(max(elapsed_s - (last_s - first_s), 0.0))
            if num > 1:
                self._service.metrics.tokens(num - 1, last_s - first_s)
        self._note_end(index, completion)

    def _note_delta(self, index: int, delta: Delta) -> None:
        gathered, now_s, num = self._gathered[index], time.perf_counter(), len(delta.token_ids)
        if num and gathered.last_s is None:
            self._note_first_token(anyio.current_time() - self._began_s)
        elif num and gathered.last_s is not None:  # of two deltas, so any clock will do, and this is quick
            self._service.metrics.tokens(num, now_s - gathered.last_s)
        gathered.add(delta, now_s)
        if delta.finish_reason is not None:
            self._note_end(index, gathered.completion())

    def _note_first_token(self, seconds: float) -> None:
        self._service.metrics.first_token(seconds)
        self._outcome.add_first_token(seconds)

    def _note_end(self, index: int, completion: Completion) -> None:
        if index % self._n == 0:
            self.usage.cached_tokens += completion.num_cached_tokens
        queue_s = queue_s_of(completion.events, self._began_s)
        self._count_end(index, completion.finish_reason, len(completion.token_ids), queue_s)
        if completion.finish_reason == "error":
            raise RequestFailedError(f"request {self._exchange.request_id}: {completion.stop_reason}")

    def _count_end(self, index: int, reason: str, num_tokens: int, queue_s: float | None) -> None:
        self._open.discard(index)
        self._outcome.add_end(reason, num_tokens, queue_s)
        num_prompt = len(self.choices[index].prompt)
        elapsed_s = anyio.current_time() - self._began_s
        self._service.metrics.finished(reason, num_prompt, num_tokens, elapsed_s, queue_s)

    def _end(self) -> None:
        """Counts what is left of it when the exchange ends as aborted, and says how it went."""
        for index in sorted(self._open):
            self._count_end(index, "abort", len(self._gathered[index].token_ids), None)
        self._exchange.noted |= self._outcome.as_noted()


def _check_context(service: Service, prompts: list[list[int]], asked: Asked | None, subject: str) -> None:
    """Checks that prompt and asked tokens fit the context.

    Raises: RequestError with the limit and both numbers.
    """
    limit, num_asked = service.port.config.max_sequence_length, 0 if asked is None else asked.num_tokens
    for prompt in prompts:
        if len(prompt) + num_asked <= limit:
            continue
        room = limit - len(prompt)
        remedy = f"ask for at most {room} tokens" if room > 0 else "shorten it"
        wanted = "" if asked is None else f" and {asked.param} is {num_asked}"
        raise RequestError(
            f"This model's maximum context length was exceeded. Your {subject} resulted in {len(prompt)}"
            f" tokens. The context holds {limit} tokens, prompt and output together; the prompt has"
            f" {len(prompt)}{wanted}: {remedy}.",
            param=subject if room <= 0 or asked is None else asked.param,
            code="context_length_exceeded",
        )


def _refused_prompt(error: InvalidRequestError, place: int, num_prompts: int, subject: str) -> RequestError:
    param = f"prompt[{place}]" if num_prompts > 1 else subject
    return RequestError(str(error), param=param)


def _nothing_generated(choice: Choice) -> Completion:
    """Gives the completion of a choice that leaves no room for output, or asked for none."""
    return Completion(
        request_id=choice.entry.request_id,
        text="",
        token_ids=[],
        finish_reason="length",
        stop_reason=None,
        num_cached_tokens=0,
        first_token_s=None,
        last_token_s=None,
    )


def _nothing_to_stream(choice: Choice) -> Delta:
    return Delta("", [], finish_reason="length", request_id=choice.entry.request_id)
