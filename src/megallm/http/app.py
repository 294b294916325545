"""The OpenAI-compatible server as a Quart app: which route is which function, and what goes round all."""

from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from quart import Quart, Response
from werkzeug.exceptions import HTTPException

from megallm.core_async.matchers import Matchers
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.errors import refusal_of
from megallm.http.gate import Gate
from megallm.http.routes import admin
from megallm.http.routes.chat import create_chat_completion
from megallm.http.routes.completions import create_completion
from megallm.http.routes.models import list_models, show_health, show_metrics, show_model
from megallm.http.routes.responses import create_response
from megallm.http.routes.tokenize import detokenize, tokenize
from megallm.http.service import AppSettings, EnginePort, Recorder, Service, Spans
from megallm.http.traffic import Traffic

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

BODY_TIMEOUT_S = 60
"""How long a client may take to send its body."""

type View = Callable[..., Awaitable[Response] | Response]


def create_app(
    port: EnginePort,
    tokenizer: TokenizerAdapter,
    settings: AppSettings,
    *,
    backend: Literal["asyncio", "trio"],
    metrics: Recorder,
    traffic: Traffic,
    matchers: Matchers | None = None,
    tracer: "Tracer | None" = None,
) -> Quart:
    """Makes the app.

    `backend`: the event loop that it is going to run in. `matchers`: see Service; `tracer`: see tracing.py.
    """
    app = _app_class(backend)("megallm.http", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = settings.bounds.max_body_bytes
    app.config["BODY_TIMEOUT"] = BODY_TIMEOUT_S
    app.config["RESPONSE_TIMEOUT"] = None
    service = Service(port, tokenizer, settings, metrics=metrics, traffic=traffic, matchers=matchers)
    add_routes(app, service)
    app.register_error_handler(Exception, _refuse)
    app.register_error_handler(HTTPException, _refuse)
    wrapped: Any = app  # Any: Quart types ASGI's dicts one by one, and documents this way of wrapping it
    wrapped.asgi_app = Gate(wrapped.asgi_app, service, _spans_of(app, service, tracer))
    return app


def _spans_of(app: Quart, service: Service, tracer: "Tracer | None") -> Spans | None:
    if tracer is None:
        return None
    from megallm.http.spans import RequestSpans  # noqa: PLC0415 - it needs an extra

    return RequestSpans(tracer, app.url_map, service.settings.model_name)


def _app_class(backend: Literal["asyncio", "trio"]) -> type[Quart]:
    if backend == "asyncio":
        return Quart
    from quart_trio import QuartTrio  # noqa: PLC0415 - a front end on asyncio starts in a fifth less time

    return QuartTrio


def add_routes(app: Quart, service: Service) -> None:
    """Adds every route; those of the API with and without `/v1`."""

    def show_named_model(name: str) -> Response:
        return show_model(service, name)

    def show_page() -> Response:
        return Response(page, content_type="text/html; charset=utf-8")

    page = files("megallm.http").joinpath("page.html").read_bytes()
    posts: dict[str, View] = {
        "/completions": partial(create_completion, service),
        "/chat/completions": partial(create_chat_completion, service),
        "/responses": partial(create_response, service),
        "/tokenize": partial(tokenize, service),
        "/detokenize": partial(detokenize, service),
        "/pause": partial(admin.pause, service),
        "/unpause": partial(admin.unpause, service),
        "/suspend": partial(admin.suspend, service),
        "/resume": partial(admin.resume, service),
        "/abort": partial(admin.abort, service),
        "/start_profile": partial(admin.profile, service, "start"),
        "/stop_profile": partial(admin.profile, service, "stop"),
    }
    gets: dict[str, View] = {
        "/models": partial(list_models, service),
        "/models/<path:name>": show_named_model,
        "/health": partial(show_health, service),
    }
    for method, views in (("POST", posts), ("GET", gets)):
        for path, view in views.items():
            _add(app, method, path, view)
            _add(app, method, f"/v1{path}", view)
    _add(app, "GET", "/metrics", partial(show_metrics, service))
    _add(app, "GET", "/", show_page)


def _add(app: Quart, method: str, path: str, view: View) -> None:
    async def answer(**names: str) -> Response:
        response = view(**names)
        return response if isinstance(response, Response) else await response

    app.add_url_rule(path, f"{method} {path.replace('.', ' ')}", answer, methods=[method])


async def _refuse(error: Exception) -> Response:
    refusal = refusal_of(error)
    return Response(refusal.body, refusal.status, refusal.headers)
