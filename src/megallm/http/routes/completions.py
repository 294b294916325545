"""POST /v1/completions: texts or token ids to go on from, whole or streamed."""

from anyio import to_thread
from quart import Response

from megallm.core_async.messages import Completion, Delta
from megallm.http.answers.choice_stream import ChoiceStream
from megallm.http.answers.exact_tokens import ending_fields, token_fields
from megallm.http.answers.generation import Asked, Choice, Generation, prepare
from megallm.http.answers.log_probs import LogProbColumns
from megallm.http.answers.replies import (
    check_model,
    exchange_of_request,
    json_reply,
    note_model,
    now,
    read_request,
    response_id,
    stream_reply,
)
from megallm.http.answers.sse import ChunkFrames, frame
from megallm.http.bodies.prompts import LONG_TEXT, prompts_of
from megallm.http.bodies.sampling import request_params
from megallm.http.bodies.schema import includes_usage
from megallm.http.bodies.schema_completions import DEFAULT_MAX_TOKENS, CompletionRequest
from megallm.http.bounds import check_completion
from megallm.http.service import Service


async def create_completion(service: Service) -> Response:
    """Answers the request that is being handled.

    Raises: RequestError; EngineBusy, DrainingError, EngineStoppedError, EngineDeadError.
    """
    request = await read_request(service, CompletionRequest)
    exchange = exchange_of_request()
    note_model(service, exchange, request.model)
    check_model(service, request.model)
    prompts = prompts_of(request.prompt)
    check_completion(request, service.settings.bounds, len(prompts))
    service.check_open()
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    params = request_params(
        request,
        service.settings,
        max_tokens=max_tokens,
        num_top=request.logprobs,
        scores_prompt=bool(request.echo) and request.logprobs is not None,
    )
    generation = await prepare(
        service,
        exchange,
        await _token_ids(service, request, prompts),
        params,
        n=request.n or 1,
        is_streamed=bool(request.stream),
        asked=None if request.max_tokens is None else Asked("max_tokens", request.max_tokens),
        interval=request.streaming_interval or 1,
        spells_specials=request.skip_special_tokens is False,
    )
    await generation.start()
    texts = [_echoed(service, prompt) if request.echo else "" for prompt in prompts]
    writer = _Writer(service, request, generation, texts)
    if request.stream:
        stream = ChoiceStream(generation, writer, with_usage=includes_usage(request))
        return stream_reply(stream, exchange)
    return json_reply(writer.whole(await generation.complete()))


async def _token_ids(
    service: Service, request: CompletionRequest, prompts: list[str | list[int]]
) -> list[list[int]]:
    """Tokenises what is text, off the loop when that takes long."""
    begins = request.add_special_tokens is not False

    def encode_all() -> list[list[int]]:
        encode = service.encoder.encode
        return [encode(each, begins=begins) if isinstance(each, str) else each for each in prompts]

    num_characters = sum(len(each) for each in prompts if isinstance(each, str))
    return await to_thread.run_sync(encode_all) if num_characters > LONG_TEXT else encode_all()


def _echoed(service: Service, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else service.tokenizer.detokenize(prompt)


class _Writer:
    """Writes the choices of one request, whole or in chunks."""

    def __init__(
        self, service: Service, request: CompletionRequest, generation: Generation, texts: list[str]
    ) -> None:
        """`texts`: what each prompt's choices begin with."""
        self._head: dict[str, object] = {
            "id": response_id("cmpl"),
            "object": "text_completion",
            "created": now(),
            "model": service.settings.model_name,
        }
        self._chunks = ChunkFrames(self._head)
        self._generation = generation
        self._texts = texts
        self._echoes = bool(request.echo)
        self._returns_token_ids = bool(request.return_token_ids)
        self._columns = [
            None if request.logprobs is None else LogProbColumns(service.vocabulary)
            for _ in generation.choices
        ]
        self._has_begun = [False] * len(generation.choices)

    def whole(self, completions: list[Completion]) -> dict[str, object]:
        """Gives the response of a request that is not streamed."""
        choices = [
            {
                "index": choice.index,
                "text": self._texts[choice.prompt_index] + completion.text,
                "logprobs": self._log_probs(choice, completion, begins=True),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "prompt_token_ids": choice.prompt,
                **token_fields(completion, returns_token_ids=self._returns_token_ids),
            }
            for choice, completion in zip(self._generation.choices, completions, strict=True)
        ]
        return {**self._head, "choices": choices, "usage": self._generation.usage.as_json()}

    def chunks(self, index: int, delta: Delta) -> bytes:
        """Gives the frames of one choice's news; with its last, the frame that ends it."""
        choice = self._generation.choices[index]
        begins, self._has_begun[index] = not self._has_begun[index], True
        text = (self._texts[choice.prompt_index] if begins else "") + delta.text
        frames = b""
        if text or delta.token_ids or delta.prompt_log_probs:
            news: dict[str, object] = {
                "index": index,
                "text": text,
                "logprobs": self._log_probs(choice, delta, begins=begins),
                "finish_reason": None,
            }
            if self._returns_token_ids:
                news["token_ids"] = delta.token_ids
                if begins:
                    news["prompt_token_ids"] = choice.prompt
            frames = self._chunks.chunk(news)
        if delta.finish_reason is not None:
            frames += self._chunks.chunk(
                {
                    "index": index,
                    "text": "",
                    "logprobs": None,
                    "finish_reason": delta.finish_reason,
                    "stop_reason": delta.stop_reason,
                    **ending_fields(self._generation.streamed(index)),
                }
            )
        return frames

    def usage_chunk(self) -> bytes:
        """Gives the frame of the token counts."""
        return frame({**self._head, "choices": [], "usage": self._generation.usage.as_json()})

    def _log_probs(
        self, choice: Choice, news: Completion | Delta, *, begins: bool
    ) -> dict[str, object] | None:
        """Gives the log-probs of some output; at its beginning those of an echoed prompt come before."""
        columns = self._columns[choice.index]
        if columns is None:
            return None
        if begins and self._echoes:
            columns.add_first(choice.prompt[0])
            columns.add(choice.prompt[1:], news.prompt_log_probs or [], news.prompt_top)
        columns.add(news.token_ids, news.log_probs or [], news.top)
        return columns.take()
