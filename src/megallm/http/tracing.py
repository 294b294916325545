"""Where the spans of one process go: to the program's own tracer provider, else to an OTLP collector.

What the OTLP exporter needs to know it reads from the environment itself, by the variables that
OpenTelemetry names. Imports OpenTelemetry only where requests are to be traced.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import anyio

from megallm.core_async.kit.foreign import on_own_thread

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

SCOPE: Final = "megallm.http"
"""What the spans say made them."""
FLUSH_S: Final = 0.4
"""For a collector to take the last spans. The drain before may take 1.5 s more than its time, and all of
it two: see Server."""


def require_opentelemetry() -> None:
    """Checks that requests can be traced.

    Raises: ImportError naming the extra that brings what is missing.
    """
    try:
        is_there = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise ImportError(
            "tracing needs OpenTelemetry and its OTLP exporter over HTTP, which are not installed;"
            " pip install 'megallm[otel]'"
        )


@asynccontextmanager
async def tracing(*, is_wanted: bool) -> "AsyncGenerator[Tracer | None]":
    """Gives what makes this process's spans while the block runs; None where none are wanted.

    A provider that the program has set is used and left alone. Else there is one of our own, whose
    last spans are exported after the block: a collector that does not answer holds nobody up.
    Raises: ImportError naming the extra that is missing.
    """
    if not is_wanted:
        yield None
        return
    require_opentelemetry()
    from opentelemetry import trace  # noqa: PLC0415 - an extra

    found = trace.get_tracer_provider()
    if not isinstance(found, trace.ProxyTracerProvider):
        yield found.get_tracer(SCOPE)
        return
    own = _otlp_provider()
    try:
        yield own.get_tracer(SCOPE)
    finally:
        with anyio.move_on_after(FLUSH_S, shield=True):
            await on_own_thread(own.shutdown)


def _otlp_provider() -> "TracerProvider":
    """Makes a provider that exports in a thread of its own.

    It is not shut down at the interpreter's end: that would wait for a collector that is not there.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - an extra
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415 - an extra
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - an extra
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - an extra

    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # nobody has named it
        resource = resource.merge(Resource({SERVICE_NAME: "megallm"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
