"""One server span for each request, with what the conventions want said of it."""

from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode, format_trace_id, use_span

from megallm.http.service import AppSettings
from tests.http.asgi_call import AsgiCall
from tests.http.serving import Served, serving, serving_config
from tests.http.traces import Traces

pytestmark = pytest.mark.anyio

C = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
LONG = serving_config(num_blocks=1024, max_sequence_length=4096)
ENDLESS = {**BODY, "max_tokens": 4000, "stream": True}
PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


def said(span: ReadableSpan, *names: str) -> tuple[object, ...]:
    """Gives attributes of a span; None for what it does not say."""
    attributes: Mapping[str, object] = span.attributes or {}
    return tuple(attributes.get(name) for name in names)


async def traced(served: Served, traces: Traces, body: object = BODY, **headers: str) -> ReadableSpan:
    """Posts a completions request and gives its span."""
    await served.post(C, body, **headers)
    return traces.take()


async def test_a_span_says_what_was_asked_and_what_came_of_it() -> None:
    """What a dashboard of such servers reads; a request that went well has no status."""
    traces = Traces()
    async with serving(
        settings=AppSettings(model_name="m"), tracer=traces.tracer, checks_idle=False
    ) as served:
        messages = [{"role": "user", "content": "hi"}]
        answer = await served.post(
            "/v1/chat/completions",
            {"model": "m", "messages": messages, "max_tokens": 4, "ignore_eos": True},
            x_request_id="mine",
        )
        span, usage = traces.take(), answer.json()["usage"]
    assert (span.name, span.kind) == ("POST /v1/chat/completions", SpanKind.SERVER)
    assert span.status.status_code == StatusCode.UNSET
    assert said(span, "http.request.method", "http.route", "http.response.status_code", "error.type") == (
        "POST",
        "/v1/chat/completions",
        200,
        None,
    )
    assert said(span, "gen_ai.operation.name", "gen_ai.request.model", "gen_ai.response.model") == (
        "chat",
        "m",
        "m",
    )
    assert said(span, "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens") == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert said(span, "gen_ai.response.finish_reasons", "gen_ai.request.id") == (("length",), "mine")
    assert said(span, "url.scheme", "server.address", "gen_ai.provider.name") == ("http", "test", "megallm")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_token_and_the_queue_are_timed(stream: bool) -> None:  # noqa: FBT001 - a parameter
    """Where a slow answer lost its time, also of one that is streamed."""
    traces = Traces()
    async with serving(tracer=traces.tracer, checks_idle=False, step_s=0.002) as served:
        span = await traced(served, traces, {**BODY, "stream": stream, "n": 2})
    first_s, queue_s = said(span, "gen_ai.latency.time_to_first_token", "gen_ai.latency.time_in_queue")
    assert isinstance(first_s, float)
    assert isinstance(queue_s, float)
    assert span.start_time is not None
    assert span.end_time is not None
    assert 0 <= queue_s <= first_s <= (span.end_time - span.start_time) / 1e9
    assert said(span, "gen_ai.response.finish_reasons", "gen_ai.usage.output_tokens") == (("length",) * 2, 8)


async def test_a_span_goes_on_under_the_callers_trace() -> None:
    """The agent that asked, and what it asked, are one picture; what is no parent begins a trace."""
    traces = Traces()
    async with serving(tracer=traces.tracer, checks_idle=False) as served:
        span = await traced(served, traces, traceparent=PARENT, tracestate="a=1")
        assert span.parent is not None
        assert (span.parent.trace_id, span.parent.span_id) == (int("ab" * 16, 16), int("cd" * 8, 16))
        assert span.parent.is_remote
        assert span.parent.trace_state["a"] == "1"
        for odd in ({}, {"traceparent": "00-nonsense"}, {"traceparent": f"00-{'0' * 32}-{'0' * 16}-01"}):
            assert (await traced(served, traces, **odd)).parent is None


async def test_what_the_program_traces_is_no_parent() -> None:
    """A server is started inside some span of its program's, which has nothing to do with its requests."""
    traces = Traces()
    with use_span(traces.tracer.start_span("main")):
        async with serving(tracer=traces.tracer, checks_idle=False) as served:
            assert (await traced(served, traces)).parent is None


async def test_a_trace_that_is_not_sampled_goes_nowhere() -> None:
    """Its first service decides so for all."""
    traces = Traces()
    async with serving(tracer=traces.tracer, checks_idle=False) as served:
        assert (await served.post(C, BODY, traceparent=PARENT[:-2] + "00")).status_code == 200
        assert traces.spans == ()


async def test_a_span_of_a_client_that_leaves_ends_with_its_stream() -> None:
    """It says so, and how much had come; until then it has not ended."""
    traces = Traces()
    async with serving(LONG, tracer=traces.tracer, checks_idle=False) as served:
        call = AsgiCall(served, C, ENDLESS)
        await call.until_chunks(3)
        assert traces.spans == ()
        call.leave()
        await call.ended()
        span = traces.take()
    assert span.status.status_code == StatusCode.ERROR
    assert said(span, "error.type", "http.response.status_code") == ("client_left", 200)
    assert said(span, "gen_ai.response.finish_reasons") == (("abort",),)
    (num_tokens,) = said(span, "gen_ai.usage.output_tokens")
    assert isinstance(num_tokens, int)
    assert 3 <= num_tokens < 4000


async def test_a_stream_that_ends_with_an_error_is_one() -> None:
    """Its status was 200 long before: what failed stands in the span alone."""
    traces = Traces()
    settings = AppSettings(api_key="k")
    async with serving(LONG, settings=settings, tracer=traces.tracer, checks_idle=False) as served:
        key = ("authorization", "Bearer k")
        call = AsgiCall(served, C, ENDLESS, headers=[key, ("x-request-id", "one")])
        await call.until_chunks(2)
        served.traffic.abort("one")
        await call.ended()
        span = traces.take()
    assert span.status.status_code == StatusCode.ERROR
    assert said(span, "error.type", "http.response.status_code") == ("AbortedError", 200)


@pytest.mark.parametrize(
    ("method", "path", "body", "name", "status"),
    [
        ("POST", C, b"{", f"POST {C}", 400),
        ("POST", C, b'{"prompt": "a", "model": "other"}', f"POST {C}", 404),
        ("POST", "/nothing", b"", "POST", 404),
        ("GET", C, b"", "GET", 405),
        ("GET", "/v1/models/a/b", b"", "GET /v1/models/<path:name>", 404),
        ("WORD", C, b"", "HTTP", 405),
    ],
)
async def test_a_request_that_is_refused_is_an_error(
    method: str, path: str, body: bytes, name: str, status: int
) -> None:
    """A name comes from the routes alone: clients may send any path, and any word as their method."""
    traces = Traces()
    async with serving(tracer=traces.tracer, checks_idle=False) as served:
        assert (await served.client.request(method, path, content=body)).status_code == status
        span = traces.take()
    assert (span.name, span.status.status_code) == (name, StatusCode.ERROR)
    assert said(span, "error.type", "http.response.status_code") == (str(status), status)


async def test_what_is_refused_before_the_routes_is_traced_too() -> None:
    """A wrong key is what people look for."""
    traces = Traces()
    async with serving(settings=AppSettings(api_key="k"), tracer=traces.tracer, checks_idle=False) as served:
        span = await traced(served, traces)
    assert (span.name, span.status.status_code) == (f"POST {C}", StatusCode.ERROR)
    assert said(span, "error.type") == ("401",)


async def test_what_machines_ask_every_few_seconds_has_none() -> None:
    """Traces would be of nothing else."""
    traces = Traces()
    async with serving(tracer=traces.tracer, checks_idle=False) as served:
        for path in ("/health", "/metrics"):
            await served.client.get(path)
        assert traces.spans == ()


async def test_the_log_names_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    """From a line to its trace, and back."""
    traces = Traces()
    with caplog.at_level("INFO", logger="megallm.http.access_log"):
        async with serving(tracer=traces.tracer, checks_idle=False) as served:
            span = await traced(served, traces)
    (record,) = [each for each in caplog.records if each.name == "megallm.http.access_log"]
    assert span.context is not None
    assert getattr(record, "access", {})["trace_id"] == format_trace_id(span.context.trace_id)
