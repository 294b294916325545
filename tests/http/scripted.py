"""An engine that answers every request with the same text, and the openai client of an app round it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import sniffio
from openai import AsyncOpenAI

from megallm.core_async.actors.detokenizer import Parcel
from megallm.core_async.config import EngineConfig
from megallm.core_async.errors import EngineStoppedError
from megallm.core_async.kit.outbox import Outbox
from megallm.core_async.messages import Completion, Delta, EngineStats, Finished, NewRequest, RequestId
from megallm.core_async.plan.phases import Phase
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.app import create_app
from megallm.http.metrics import Metrics
from megallm.http.service import AppSettings
from megallm.http.traffic import Traffic
from tests.engines import engine_config
from tests.http.small_tokenizer import small_tokenizer

NUM_CACHED = 2


class PartsOutbox(Outbox[Parcel]):
    """Gives one parcel at a time, as an engine does whose reader is fast."""

    async def take(self) -> list[Parcel]:
        """See Outbox."""
        first, *rest = await super().take()
        for parcel in rest:
            self.put(parcel)
        return [first]


class ScriptedPort:
    """The port of such an engine; each part of the text comes with one token."""

    def __init__(self, parts: Sequence[str], finish_reason: str, config: EngineConfig) -> None:
        self.config = config
        self.phase = Phase.RUNNING
        self.requests: list[NewRequest] = []
        """What was submitted."""
        self._parts = parts
        self._finish_reason = finish_reason

    def stats(self) -> EngineStats:
        """Gives none."""
        return EngineStats()

    def next_request_id(self) -> RequestId:
        """Gives an id for each request; here all are alike."""
        return RequestId(7)

    def check_alive(self) -> None:
        """It is."""

    def error(self) -> EngineStoppedError:
        """Gives what nobody asks for."""
        return EngineStoppedError("the script is over")

    async def submit(self, requests: Sequence[NewRequest]) -> Outbox[Parcel]:
        """Answers one request."""
        (request,) = requests
        self.requests.append(request)
        outbox = PartsOutbox([request.request_id], lambda _: None)
        ending = Finished(request.request_id, self._finish_reason, num_cached_tokens=NUM_CACHED)
        if request.text.is_streamed:
            for place, part in enumerate(self._parts):
                is_last = place == len(self._parts) - 1
                outbox.put(
                    Delta(
                        part,
                        [1],
                        request_id=request.request_id,
                        finish_reason=self._finish_reason if is_last else None,
                        ending=ending if is_last else None,
                    )
                )
        else:
            outbox.put(
                Completion(
                    request.request_id,
                    "".join(self._parts),
                    [1] * len(self._parts),
                    self._finish_reason,
                    None,
                    NUM_CACHED,
                    None,
                    None,
                )
            )
        return outbox

    def abort_elsewhere(self, request_id: str | None) -> None:
        """Has nobody to tell."""

    async def pause(self, mode: str = "keep") -> None:
        """Does nothing, as the next four."""

    async def unpause(self) -> None: ...
    async def suspend(self) -> None: ...
    async def resume(self) -> None: ...
    async def profile(self, action: str) -> None: ...


@asynccontextmanager
async def scripted_client(
    *parts: str, finish_reason: str = "stop", parsers: tuple[str, ...] = (), max_sequence_length: int = 4096
) -> AsyncGenerator[tuple[AsyncOpenAI, ScriptedPort]]:
    """Gives the openai client of an app whose model always says the same, and the engine's port."""
    config = engine_config(
        num_blocks=4096, max_tokens=max_sequence_length, max_sequence_length=max_sequence_length
    )
    port = ScriptedPort(parts, finish_reason, config)
    app: Any = create_app(  # Any: Quart and httpx type ASGI differently
        port,
        TokenizerAdapter(small_tokenizer()),
        AppSettings(model_name="m", parsers=parsers),
        backend="trio" if sniffio.current_async_library() == "trio" else "asyncio",
        metrics=Metrics(port.stats, "m"),
        traffic=Traffic(),
    )
    transport = httpx.ASGITransport(app)
    http: Any = httpx.AsyncClient(transport=transport)  # Any: openai names a successor of httpx here
    async with AsyncOpenAI(
        base_url="http://app/v1", api_key="none", http_client=http, max_retries=0
    ) as client:
        yield client, port
