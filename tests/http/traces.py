"""Where spans end in tests: in this process's memory, or at a collector on loopback."""

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from megallm.http.connections.app_server import AppServer
from tests.http.loopback import ANSWER_S, App, Receive, Scope, Send, answer, body_of, config


class Traces:
    """A program's own tracer provider, whose spans stay in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        """What has ended."""
        return self._exporter.get_finished_spans()

    def take(self) -> ReadableSpan:
        """Gives the one span that has ended since the last call."""
        (span,) = self.spans
        self._exporter.clear()
        return span


class Collector(App):
    """An OTLP collector: notes the spans that come, and who sent them."""

    def __init__(self) -> None:
        super().__init__()
        self.port = 0
        self.paths: set[str] = set()
        self.services: set[str] = set()
        self.spans: list[Any] = []  # Any: protobuf's Span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.add(scope["path"])
        batch = ExportTraceServiceRequest.FromString(await body_of(receive))
        for part in batch.resource_spans:
            named = {each.key: each.value.string_value for each in part.resource.attributes}
            self.services.add(named["service.name"])
            self.spans += [span for scoped in part.scope_spans for span in scoped.spans]
        await answer(send, b"")


@asynccontextmanager
async def collecting() -> AsyncGenerator[Collector]:
    """Runs a collector, in this loop, until the block ends."""
    collector = Collector()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        collector.port = listener.getsockname()[1]
        server = AppServer(collector, listener, config(), collector)  # type: ignore[arg-type] - as in loopback.py
        with anyio.fail_after(ANSWER_S * 6):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.run)
                yield collector
                server.begin_drain(0.0)
