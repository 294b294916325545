"""Where a process's spans go: to the program's provider, or over OTLP, and nobody waits for a collector."""

import socket
import sys

import anyio
import pytest
from opentelemetry import trace

from megallm.http.tracing import FLUSH_S, require_opentelemetry, tracing
from tests.http.sites import Site, site
from tests.http.traces import Collector, Traces, collecting

pytestmark = pytest.mark.anyio

COMPLETIONS = "POST /v1/completions"


def sent_to(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Names a collector as users do."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")


async def test_without_it_there_is_none() -> None:
    """Most servers have no collector."""
    async with tracing(is_wanted=False) as tracer:
        assert tracer is None


@pytest.mark.parametrize("name", ["opentelemetry", "opentelemetry.exporter.otlp.proto.http"])
def test_what_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans that go nowhere are found missing when they are needed."""
    for each in [each for each in sys.modules if each.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'megallm\[otel\]'"):
        require_opentelemetry()


async def test_a_provider_of_the_programs_is_used_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its exporters, and goes on when the server has stopped."""
    traces = Traces()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: traces.provider)
    async with tracing(is_wanted=True) as tracer:
        assert tracer is not None
        tracer.start_span("a").end()
    traces.tracer.start_span("b").end()
    assert [span.name for span in traces.spans] == ["a", "b"]


@pytest.mark.parametrize("name", [None, "chat-eu"])
async def test_the_last_spans_reach_the_collector(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for more of them; a server that stops does not take them along."""
    if name is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", name)
    async with collecting() as collector:
        sent_to(monkeypatch, collector.port)
        async with tracing(is_wanted=True) as tracer:
            assert tracer is not None
            tracer.start_span("last").end()
        assert [span.name for span in collector.spans] == ["last"]
        assert (collector.services, collector.paths) == ({name or "megallm"}, {"/v1/traces"})


async def test_a_collector_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither may a cancel cut the last export short, nor the export the end of the process."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sent_to(monkeypatch, silent.getsockname()[1])
        before = anyio.current_time()
        with anyio.move_on_after(0.0):
            async with tracing(is_wanted=True) as tracer:
                assert tracer is not None
                tracer.start_span("lost").end()
                await anyio.sleep_forever()
        assert FLUSH_S <= anyio.current_time() - before < FLUSH_S + 1.5


async def expect_traced(here: Site, collector: Collector) -> None:
    """Fails unless each request is one span at the collector, once the server has stopped."""
    await here.complete([1, 2], 4)
    stream = await here.stream([1], 4000)
    stream.close()
    here.server.begin_stop(5.0)
    await here.has_ended.wait()
    whole, left = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert (whole.name, left.name) == (COMPLETIONS, COMPLETIONS)
    assert {each.key for each in whole.attributes} >= {"gen_ai.usage.output_tokens", "http.route"}
    (error,) = [each.value.string_value for each in left.attributes if each.key == "error.type"]
    assert error == "client_left"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_front_ends_export_what_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a process of its own, and is told where to by the environment that it has from ours."""
    async with collecting() as collector:
        sent_to(monkeypatch, collector.port)
        async with site(1, tracing=True, step_s=0.002) as here:
            await expect_traced(here, collector)


async def test_the_engines_own_process_exports_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no front ends, on either loop."""
    async with collecting() as collector:
        sent_to(monkeypatch, collector.port)
        async with site(0, tracing=True, step_s=0.002) as here:
            await expect_traced(here, collector)
