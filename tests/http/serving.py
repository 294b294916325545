"""The HTTP app over a real engine with the fake model, called through ASGI, on the loop of the test."""

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import anyio
import httpx
import sniffio
from anyio.abc import TaskGroup
from msgspec import structs
from quart import Quart

from megallm.core_async.config import EngineConfig
from megallm.core_async.engine import Engine, WorkerActor
from megallm.core_async.protocols import Runner
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.app import create_app
from megallm.http.service import AppSettings, Bounds
from megallm.http.traffic import Traffic
from megallm.models.chat_template import render
from tests.byte_tokenizer import ByteTokenizer
from tests.engines import engine_config, fake_runner, inline_worker
from tests.fakes import FakeRunner, next_token

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

ANSWER_S = 10.0
"""Longer than anything here takes, also on a busy machine."""

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.x }}]{% endfor %}"
    "<|end|>{% endfor %}{% if tools %}tools={{ tools | length }}{% endif %}"
    "{% if enable_thinking %}think{% endif %}{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)

KNOWN_PROMPT = "known"
"""A prompt whose greedy answer the oracle asks for."""


class ChatTokenizer(ByteTokenizer):
    """The byte tokenizer with a chat template."""

    chat_template: str | None = TEMPLATE

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],  # Any: what JSON holds
        *,
        tokenize: bool = False,
        **options: Any,  # Any: the same
    ) -> str:
        """Gives the text of a conversation."""
        assert not tokenize
        return render(self.chat_template or "", conversation, **options)


class BosTokenizer(ChatTokenizer):
    """One that puts a bos before every text, as Llama's do."""

    def tokenize(self, text: str) -> list[int]:
        """Gives the ids of a text, the bos first."""
        return [self.bos, *super().tokenize(text)]


class Script:
    """A model that says what a test wants after some prompts, and what the fake model says after others."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def say(self, prompt: Sequence[int], answer: str | Sequence[int]) -> list[int]:
        """Makes an answer, then the end of sequence, follow a prompt; gives the answer's tokens."""
        tokens = self._tokenizer.tokenize(answer) if isinstance(answer, str) else list(answer)
        self._answers[tuple(prompt)] = [*tokens, self._tokenizer.eod]
        return tokens

    def choose(self, context: Sequence[int], masked: Sequence[int]) -> int:
        """Gives the next token: of the longest prompt that the context begins with."""
        known = [prompt for prompt in self._answers if tuple(context[: len(prompt)]) == prompt]
        if not known:
            return next_token(context, masked)
        prompt = max(known, key=len)
        rest = self._answers[prompt][len(context) - len(prompt) :]
        return rest[0] if rest else self._tokenizer.eod


class Counts:
    """Metrics that keep what they were told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[Any, ...]]] = []  # Any: numbers and texts

    def add_request(self, num_prompt_tokens: int, n: int, max_tokens: int | None) -> None:
        self.told.append(("request", (num_prompt_tokens, n, max_tokens)))

    def first_token(self, seconds: float) -> None:
        assert seconds >= 0
        self.told.append(("first", ()))

    def tokens(self, num: int, seconds: float) -> None:
        assert seconds >= 0
        self.told.append(("tokens", (num,)))

    def finished(
        self,
        finish_reason: str,
        num_prompt_tokens: int,
        num_output_tokens: int,
        e2e_s: float,
        queue_s: float | None,
    ) -> None:
        assert e2e_s >= 0
        assert queue_s is None or queue_s >= 0
        self.told.append(("finished", (finish_reason, num_prompt_tokens, num_output_tokens)))
        if queue_s is not None:
            self.told.append(("queue", ()))

    def render(self) -> tuple[bytes, str]:
        return b"# nothing\n", "text/plain; version=0.0.4"

    def of(self, what: str) -> list[tuple[Any, ...]]:  # Any: the same
        """Gives what was told of one kind."""
        return [values for kind, values in self.told if kind == what]


class Served:
    """One app and all that is behind it."""

    def __init__(
        self, app: Quart, engine: Engine, runner: FakeRunner, tokenizer: ChatTokenizer, tasks: TaskGroup
    ) -> None:
        self.app = app
        self.engine = engine
        self.runner = runner
        self.tokenizer = tokenizer
        self.script = Script(tokenizer)
        runner.choose = self.script.choose
        self.counts = Counts()
        self.traffic = Traffic()
        self.tasks = tasks
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(cast("Any", app)), base_url="http://test"
        )
        # cast: Quart types ASGI by hypercorn's dicts

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        """Posts JSON, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, content=content, headers=named)

    async def json(self, path: str, body: object, status: int = 200) -> dict[str, Any]:  # Any: JSON
        """Posts and gives the JSON of a response that has to have a status."""
        response = await self.post(path, body)
        assert response.status_code == status, response.text
        return strict_json(response.content)

    async def refused(self, path: str, body: object, status: int = 400) -> dict[str, Any]:  # Any: JSON
        """Posts what has to be refused; gives the error."""
        error = (await self.json(path, body, status))["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    async def events(self, path: str, body: Mapping[str, object]) -> list[dict[str, Any]]:  # Any: JSON
        """Posts with `stream` and gives the events before `[DONE]`, which has to be there."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        frames = frames_of(response.content)
        assert frames[-1] == b"[DONE]", frames[-1]
        return [strict_json(each) for each in frames[:-1]]

    def prompt_of(self, *messages: dict[str, Any]) -> list[int]:  # Any: JSON
        """Gives what the template makes of messages, as ids."""
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        return ByteTokenizer.tokenize(self.tokenizer, text)

    async def expect_idle(self) -> None:
        """The standing oracle: healthy, idle, no block lost, and a known answer is still the same."""
        health = await self.client.get("/health")
        body = {"prompt": KNOWN_PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = await self.json("/v1/completions", body)
        expected = expected_tokens(self.tokenizer.tokenize(KNOWN_PROMPT), 8)
        assert answer["choices"][0]["generation_token_ids"] == expected
        await eventually(lambda: self.num_busy == 0)
        stats = self.engine.stats()
        assert stats.free_blocks + stats.cached_blocks == self.engine.config.num_blocks
        assert health.status_code == 200, health.text

    @property
    def num_busy(self) -> int:
        """What the engine has not given up yet: requests, and blocks."""
        stats = self.engine.stats()
        return stats.running + stats.waiting + stats.used_blocks


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Gives the fake model's greedy answer."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def frames_of(body: bytes) -> list[bytes]:
    """Gives what the frames of a stream hold; each is one `data:` line and an empty one."""
    assert body.endswith(b"\n\n")
    frames = body.removesuffix(b"\n\n").split(b"\n\n")
    assert all(each.startswith(b"data: ") and b"\n" not in each for each in frames)
    return [each.removeprefix(b"data: ") for each in frames]


def strict_json(text: bytes) -> dict[str, Any]:  # Any: JSON
    """Parses JSON that has neither NaN nor Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


async def eventually(holds: Callable[[], object]) -> None:
    """Waits for something that another task brings about."""
    with anyio.fail_after(ANSWER_S):
        while not holds():
            await anyio.lowlevel.checkpoint()


def serving_config(
    *, num_blocks: int = 256, max_requests: int = 16, max_sequence_length: int = 512, max_waiting: int = 1000
) -> EngineConfig:
    """Gives limits for the fake model with the byte tokenizer's vocabulary."""
    config = engine_config(
        num_blocks=num_blocks,
        max_requests=max_requests,
        max_tokens=max_sequence_length,
        max_sequence_length=max_sequence_length,
        max_waiting=max_waiting,
    )
    return structs.replace(config, vocab_size=ByteTokenizer.vocab_size)


@asynccontextmanager
async def serving(
    config: EngineConfig | None = None,
    *,
    settings: AppSettings | None = None,
    bounds: Bounds | None = None,
    tokenizer: ChatTokenizer | None = None,
    step_s: float = 0.0,
    checks_idle: bool = True,
    tracer: "Tracer | None" = None,
) -> AsyncGenerator[Served]:
    """Runs an app over an engine in the test's loop. Afterwards the standing oracle has to hold."""
    limits = serving_config() if config is None else config
    runner, chosen = fake_runner(limits), tokenizer or ChatTokenizer()

    def make_worker(runner: Runner) -> WorkerActor:
        return inline_worker(runner, step_s)

    adapter = TokenizerAdapter(chosen)
    engine = Engine(limits, runner, adapter, make_worker=make_worker)
    told = settings or AppSettings(model_name="fake")
    backend = cast("Literal['asyncio', 'trio']", sniffio.current_async_library())  # cast: it is one of them
    async with anyio.create_task_group() as tasks:
        await tasks.start(engine.run)
        served = Served(
            cast("Any", None), engine, runner, chosen, tasks
        )  # cast: the app needs its parts first
        served.app = create_app(
            engine,
            adapter,
            told if bounds is None else structs.replace(told, bounds=bounds),
            backend=backend,
            metrics=served.counts,
            traffic=served.traffic,
            tracer=tracer,
        )
        served.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(cast("Any", served.app)), base_url="http://test"
        )
        async with served.client:
            yield served
            if checks_idle:
                await served.expect_idle()
        await engine.shutdown()
        tasks.cancel_scope.cancel()
