"""What every route does alike: reads its body, finds its exchange, and writes JSON or a stream."""

import secrets
import time
from typing import Any, Final

import msgspec
from msgspec import Struct
from quart import Response, request

from megallm.http.answers.sse import HEADERS, EventStream, Source
from megallm.http.bodies.body import decode
from megallm.http.errors import RequestError
from megallm.http.service import Service
from megallm.http.traffic import Exchange

EXCHANGE: Final = "megallm.exchange"
"""Where the ASGI scope keeps the exchange of a request."""


def exchange_of_request() -> Exchange:
    """Gives the exchange of the request that is being answered."""
    scope: Any = request.scope  # Any: Quart types it as the specification's keys alone
    exchange = scope[EXCHANGE]
    assert isinstance(exchange, Exchange), f"the scope holds {exchange!r}"
    return exchange


async def read_request[T: Struct](service: Service, kind: type[T]) -> T:
    """Reads the body of the request that is being answered, whatever content type it names.

    Raises: RequestError naming the path; RequestEntityTooLarge.
    """
    body = await request.get_data(cache=False, as_text=False)
    assert isinstance(body, bytes), "Quart gave text where bytes were asked for"
    return decode(body, kind, service.unknown_fields, request.path)


def check_model(service: Service, name: str | None) -> None:
    """Checks the model that a request names; none is ours.

    Raises: RequestError naming what is served.
    """
    if name and name not in service.model_names:
        raise RequestError(
            f"the model {shortened(name)!r} does not exist here; served is {', '.join(service.model_names)}",
            param="model",
            code="model_not_found",
            status=404,
        )


def note_model(service: Service, exchange: Exchange, name: str | None) -> None:
    """Notes the model that a request names, known or not, for the log and the trace."""
    exchange.noted["model"] = shortened(name or service.settings.model_name)


def json_reply(value: object, status: int = 200) -> Response:
    """Gives a JSON response; NaN and infinity can't come out of it."""
    return Response(msgspec.json.encode(value), status, content_type="application/json")


def stream_reply(source: Source, exchange: Exchange) -> Response:
    """Gives a response whose frames come from a source; the exchange is closed when it is left."""
    response = Response(EventStream(source, exchange.close), 200, HEADERS)
    response.timeout = None  # else Quart cuts it silently after a minute
    return response


def response_id(prefix: str) -> str:
    """Gives an id that no other response has."""
    return f"{prefix}-{secrets.token_hex(16)}"


def now() -> int:
    """Gives the time in seconds since 1970."""
    return int(time.time())


MAX_SHOWN: Final = 200


def shortened(text: str) -> str:
    """Gives the part of a caller's text that an error repeats."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
