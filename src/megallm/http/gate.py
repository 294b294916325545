"""Round the whole app, for every request: its id, its key, its bounds, its log line, its end.

Plain ASGI: what it refuses never reaches the web framework, and what a request has opened is closed
when it ends, however it ends.
"""

import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from megallm.http.access_log import log_access
from megallm.http.answers.replies import EXCHANGE
from megallm.http.auth import check_key
from megallm.http.connections.hangup import keep_reading
from megallm.http.cors import cors_headers, is_preflight, preflight_headers
from megallm.http.errors import Refusal, RequestError, refusal_of
from megallm.http.service import Service, Spans
from megallm.http.traffic import Exchange

type Scope = MutableMapping[str, Any]  # Any: ASGI's own, as are the messages
type Event = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[Event]]
type Send = Callable[[Event], Awaitable[None]]
type App = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUEST_ID: Final = re.compile(r"[\w.:/=+@-]{1,128}", re.ASCII)
"""What a client's X-Request-Id may look like; another is replaced."""


class Gate:
    """An ASGI app round another one."""

    def __init__(self, app: App, service: Service, spans: Spans | None = None) -> None:
        """`spans`: None where requests are not traced."""
        self._app = app
        self._service = service
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or passes on what is none."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await keep_reading(send)
        headers = {name.decode("latin1"): value.decode("latin1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        began_s = time.monotonic()
        with self._service.traffic.open(request_id) as exchange:
            scope[EXCHANGE] = exchange
            span = None if self._spans is None else self._spans.begin(scope, exchange)
            origins = self._service.settings.cors_origins
            answer = _Answer(
                send, {"X-Request-Id": request_id, **cors_headers(headers.get("origin"), origins)}
            )
            try:
                await self._answer(scope, receive, answer, headers)
            finally:
                exchange.close()  # which notes how it went
                _log(scope, exchange, answer, time.monotonic() - began_s)
                if span is not None:
                    span.end(answer.status)

    async def _answer(
        self, scope: Scope, receive: Receive, answer: "_Answer", headers: dict[str, str]
    ) -> None:
        settings = self._service.settings
        if is_preflight(scope["method"], headers):
            allowed = preflight_headers(headers, settings.cors_origins)
            await answer.refuse(Refusal(204 if allowed else 403, b"", allowed))
            return
        try:
            _check_headers(scope, settings.bounds.max_header_bytes)
            check_key(scope["path"], scope["headers"], settings.api_key)
        except RequestError as error:
            await answer.refuse(refusal_of(error))
            return
        await self._app(scope, receive, answer.send)


class _Answer:
    """The sending side of one request: adds headers to the response, and notes what became of it."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self.status: int | None = None
        self.is_whole = False
        self._send = send
        self._headers = _encoded(headers)

    async def send(self, event: Event) -> None:
        """Passes an event on."""
        if event["type"] == "http.response.start":
            self.status = event["status"]
            event = {**event, "headers": [*event.get("headers", ()), *self._headers]}
        await self._send(event)
        if event["type"] == "http.response.body" and not event.get("more_body", False):
            self.is_whole = True

    async def refuse(self, refusal: Refusal) -> None:
        """Sends a whole response."""
        headers = {**refusal.headers, "Content-Length": str(len(refusal.body))}
        await self.send(
            {
                "type": "http.response.start",
                "status": refusal.status,
                "headers": [
                    (name.lower().encode(), value.encode("latin1")) for name, value in headers.items()
                ],
            }
        )
        await self.send({"type": "http.response.body", "body": refusal.body, "more_body": False})


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode("latin1")) for name, value in headers.items()]


def _check_headers(scope: Scope, limit: int) -> None:
    size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    size += sum(len(name) + len(value) for name, value in scope["headers"])
    if size > limit:
        raise RequestError(f"the headers have {size:,} bytes; the limit is {limit:,}", status=431)


def _log(scope: Scope, exchange: Exchange, answer: _Answer, seconds: float) -> None:
    if not answer.is_whole:
        exchange.noted["client_left"] = True
    log_access(
        method=scope["method"],
        path=scope["path"],
        status=answer.status,
        seconds=seconds,
        request_id=exchange.request_id,
        noted=exchange.noted,
    )
