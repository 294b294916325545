"""One server span for each request, by OpenTelemetry's conventions for HTTP and for generative AI.

Imported only where requests are traced, since it needs the extra `otel`. Knows OpenTelemetry's API;
where spans go is the tracer's business, see `tracing.py`.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any, Final

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue
from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map

from megallm.http.access_log import FAILED, MAX_PATH, QUIET
from megallm.http.traffic import Exchange

OPERATIONS: Final = {
    "/completions": "text_completion",
    "/chat/completions": "chat",
    "/responses": "chat",
}
"""Routes that generate, without `/v1`, and the conventions' word for what they do."""
METHODS: Final = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE", "QUERY"}
)
"""What a span may be named by; clients may send any word."""
NOTED: Final = {
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "first_token_seconds": "gen_ai.latency.time_to_first_token",
    "queue_seconds": "gen_ai.latency.time_in_queue",
}
"""What the access log says of a request, and what a span calls it. The conventions have no word for the
last two; these are those of other servers."""


class RequestSpans:
    """Makes the spans of one app's requests."""

    def __init__(self, tracer: Tracer, routes: Map, model_name: str) -> None:
        """`routes`: what the app routes by. `model_name`: what its responses call the model."""
        self._tracer = tracer
        self._routes = routes.bind("")
        self._model_name = model_name

    def begin(self, scope: Mapping[str, Any], exchange: Exchange) -> "RequestSpan | None":  # Any: ASGI's
        """Begins the span of a request under the one that its `traceparent` names, else as a new trace.

        None for what machines ask every few seconds.
        """
        if scope["path"] in QUIET:
            return None
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        route = self._route_of(scope["path"], scope["method"])
        word = "HTTP" if method == "_OTHER" else method
        attributes = _request_attributes(scope, method, route, exchange.request_id)
        operation = OPERATIONS.get((route or "").removeprefix("/v1"))
        if operation is not None:
            attributes["gen_ai.operation.name"] = operation
            attributes["gen_ai.provider.name"] = "megallm"
            attributes["gen_ai.response.model"] = self._model_name
        name = word if route is None else f"{word} {route}"
        span = self._tracer.start_span(name, _parent_of(scope), SpanKind.SERVER, attributes)
        exchange.noted["trace_id"] = f"{span.get_span_context().trace_id:032x}"
        return RequestSpan(span, exchange)

    def _route_of(self, path: str, method: str) -> str | None:
        try:
            rule, _ = self._routes.match(path, method, return_rule=True)
        except HTTPException:
            return None
        return rule.rule


class RequestSpan:
    """The span of one request. It ends with the response's last byte, or when the client has left."""

    def __init__(self, span: Span, exchange: Exchange) -> None:
        self._span = span
        self._exchange = exchange

    def end(self, status: int | None) -> None:
        """Ends it with what was noted of the exchange. `status` None: none was sent."""
        noted = self._exchange.noted
        attributes = {attribute: noted[name] for name, attribute in NOTED.items() if name in noted}
        if "finished" in noted:
            reasons = [reason for reason, num in noted["finished"].items() for _ in range(num)]
            attributes["gen_ai.response.finish_reasons"] = reasons
        if status is not None:
            attributes["http.response.status_code"] = status
        error = _error_of(noted, status)
        if error is not None:
            attributes["error.type"] = error
            self._span.set_status(StatusCode.ERROR)
        self._span.set_attributes(attributes)
        self._span.end()


def _error_of(noted: Mapping[str, Any], status: int | None) -> str | None:  # Any: as an exchange notes it
    """Gives what went wrong, in a word of few; None where nothing did."""
    if noted.get("client_left"):
        return "client_left"
    if "error" in noted:
        return str(noted["error"])
    return None if status is None or status < FAILED else str(status)


def _parent_of(scope: Mapping[str, Any]) -> Context:
    """Gives the caller's context; never that of the task that started the server."""
    headers: MutableMapping[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin1"), []).append(value.decode("latin1"))
    return propagate.extract(headers, Context())


def _request_attributes(
    scope: Mapping[str, Any], method: str, route: str | None, request_id: str
) -> dict[str, AttributeValue]:
    """Gives what is known when a request comes; samplers see these."""
    attributes: dict[str, AttributeValue] = {
        "http.request.method": method,
        "url.scheme": scope.get("scheme", "http"),
        "url.path": scope["path"][:MAX_PATH],
        "network.protocol.version": scope.get("http_version", ""),
        "gen_ai.request.id": request_id,
    }
    if route is not None:
        attributes["http.route"] = route
    if scope.get("client"):
        attributes["client.address"] = scope["client"][0]
    if scope.get("server"):
        attributes["server.address"] = scope["server"][0]
        if scope["server"][1] is not None:
            attributes["server.port"] = scope["server"][1]
    return attributes
