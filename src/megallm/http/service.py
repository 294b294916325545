"""What every route shares: the engine behind its port, the settings, and the seams to the rest.

`EnginePort` is the part of `core_async.engine.Engine` that a front end needs; over a socket something
else implements it. Knows no web framework.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from megallm.core_async.actors.detokenizer import Parcel
from megallm.core_async.config import EngineConfig
from megallm.core_async.errors import EngineBusy, EngineDeadError, EngineStoppedError
from megallm.core_async.intake import Intake
from megallm.core_async.kit.outbox import Outbox
from megallm.core_async.matchers import Matchers
from megallm.core_async.messages import EngineStats, NewRequest, RequestId
from megallm.core_async.plan.phases import Phase
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.answers.vocabulary import Vocabulary
from megallm.http.bodies.body import UnknownFields
from megallm.http.bodies.chat_template import ChatTemplate
from megallm.http.bodies.prompts import TextEncoder
from megallm.http.traffic import DrainingError, Exchange, Traffic


class EnginePort(Protocol):
    """An engine as its HTTP front end sees it: `Engine` itself, or one in another process."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def phase(self) -> Phase: ...
    def stats(self) -> EngineStats: ...
    def next_request_id(self) -> RequestId: ...
    def check_alive(self) -> None: ...
    def error(self) -> EngineDeadError | EngineStoppedError: ...
    def abort_elsewhere(self, request_id: str | None) -> None: ...
    async def submit(self, requests: Sequence[NewRequest]) -> Outbox[Parcel]: ...
    async def pause(self, mode: str = "keep") -> None: ...
    async def unpause(self) -> None: ...
    async def suspend(self) -> None: ...
    async def resume(self) -> None: ...
    async def profile(self, action: str) -> None: ...


class Recorder(Protocol):
    """Who counts what the routes do; `http/metrics.py` is one."""

    def add_request(self, num_prompt_tokens: int, n: int, max_tokens: int | None) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def tokens(self, num: int, seconds: float) -> None: ...
    def finished(
        self,
        finish_reason: str,
        num_prompt_tokens: int,
        num_output_tokens: int,
        e2e_s: float,
        queue_s: float | None,
    ) -> None: ...
    def render(self) -> tuple[bytes, str]: ...


class Spans(Protocol):
    """Who traces the requests; `http/spans.py` is one."""

    def begin(self, scope: Mapping[str, Any], exchange: Exchange) -> "RequestSpan | None": ...  # Any: ASGI's


class RequestSpan(Protocol):
    """One traced request."""

    def end(self, status: int | None) -> None: ...


class Bounds(Struct, frozen=True, kw_only=True):
    """What one request may ask for at most; more is refused before anything is tokenised or queued."""

    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 32 << 10
    max_prompts: int = 2048
    """Prompts of one completions request."""
    max_choices: int = 4096
    """`n` times prompts."""
    max_n: int = 128
    max_logprobs: int = 20
    """Of completions."""
    max_top_logprobs: int = 20
    """Of chat."""
    max_stop_words: int = 16
    max_stop_characters: int = 1024
    """Of one stop string."""
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024
    max_messages: int = 4096
    max_tools: int = 128
    max_schema_bytes: int = 64 << 10
    """Of a JSON schema, a regular expression, a list of choices or a grammar."""
    schema_compile_s: float = 5.0
    max_waiting: int | None = None
    """Requests that may wait in the engine; more are refused as busy. None: the engine's own limit."""


class AppSettings(Struct, frozen=True, kw_only=True):
    """What the front end is told; travels to other processes as msgpack."""

    model_name: str = "megallm"
    model_aliases: tuple[str, ...] = ()
    """Further names that requests may use for the model."""
    api_key: str | None = None
    parsers: tuple[str, ...] = ()
    verbose: bool = False
    """Log the parameters of each request too."""
    is_traced: bool = False
    """Make an OpenTelemetry span of each request."""
    cors_origins: tuple[str, ...] = ()
    """Origins that browsers may call from; "*" is any."""
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    default_top_k: int = 0
    bounds: Bounds = Bounds()


class Service:
    """One front end's view of everything: the routes are functions of it and of a request."""

    def __init__(
        self,
        port: EnginePort,
        tokenizer: TokenizerAdapter,
        settings: AppSettings,
        *,
        metrics: Recorder,
        traffic: Traffic,
        matchers: Matchers | None = None,
    ) -> None:
        """`matchers`: those of an engine in this process; without them it has its own."""
        self.port = port
        self.tokenizer = tokenizer
        self.settings = settings
        self.metrics = metrics
        self.traffic = traffic
        self.created = int(time.time())
        """When the model began to be served, in seconds since 1970."""
        self.vocabulary = Vocabulary(tokenizer)
        self.encoder = TextEncoder(tokenizer)
        self.unknown_fields = UnknownFields()
        self.chat_template = ChatTemplate(tokenizer)
        self.intake = Intake(
            port.config,
            tokenizer,
            port.next_request_id,
            matchers
            or Matchers(tokenizer, port.config.vocab_size, time_limit_s=settings.bounds.schema_compile_s),
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that the model is served under; the first is what responses say."""
        return (self.settings.model_name, *self.settings.model_aliases)

    def check_open(self) -> None:
        """Raises: DrainingError; EngineStoppedError and EngineDeadError."""
        if self.traffic.is_draining:
            raise DrainingError("the server is stopping and takes no new request")
        self.port.check_alive()

    async def submit(self, exchange: Exchange, requests: Sequence[NewRequest]) -> Outbox[Parcel]:
        """Queues requests; the outbox is closed with the exchange at the latest.

        Raises: EngineBusy, DrainingError, EngineStoppedError, EngineDeadError.
        """
        self.check_open()
        exchange.check()
        limit = self.settings.bounds.max_waiting
        if limit is not None and (waiting := self.port.stats().waiting) + len(requests) > limit:
            raise EngineBusy(
                f"{waiting:,} requests wait, {len(requests):,} more came, the limit is {limit:,};"
                " try again later"
            )
        outbox = await self.port.submit(requests)
        exchange.reads(outbox)
        return outbox
