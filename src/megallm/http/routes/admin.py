"""Routes for whoever runs the server; they answer only where an API key is set."""

from typing import Literal

from msgspec import Struct
from quart import Response, request

from megallm.http.answers.replies import exchange_of_request, json_reply, read_request
from megallm.http.errors import RequestError
from megallm.http.service import Service


class PauseRequest(Struct, kw_only=True):
    """How to come to rest."""

    mode: Literal["keep", "wait", "abort"] | None = None
    """None: keep."""


class AbortRequest(Struct, kw_only=True):
    """Which requests to end: those of an X-Request-Id, or all."""

    request_id: str | None = None
    abort_all: bool | None = None


def require_admin(service: Service) -> None:
    """Raises: RequestError, 403, where no API key is set: everybody could call."""
    if service.settings.api_key is None:
        raise RequestError("this route needs a server with an api_key; set one", status=403)


async def pause(service: Service) -> Response:
    """Comes to rest; replies once no step is in flight.

    Raises: RequestError; EngineStoppedError, EngineDeadError.
    """
    require_admin(service)
    wanted = await read_request(service, PauseRequest) if await request.get_data() else PauseRequest()
    await service.port.pause(wanted.mode or "keep")
    return _phase(service)


async def unpause(service: Service) -> Response:
    """Goes on. Raises: RequestError; LifecycleError; EngineStoppedError, EngineDeadError."""
    require_admin(service)
    await service.port.unpause()
    return _phase(service)


async def suspend(service: Service) -> Response:
    """Pauses and gives the cache's memory back. Raises: as `pause`."""
    require_admin(service)
    await service.port.suspend()
    return _phase(service)


async def resume(service: Service) -> Response:
    """Takes the cache's memory again. Raises: as `pause`."""
    require_admin(service)
    await service.port.resume()
    return _phase(service)


async def abort(service: Service) -> Response:
    """Ends requests, those of the other front ends as well; says how many they were here.

    Raises: RequestError.
    """
    require_admin(service)
    wanted = await read_request(service, AbortRequest)
    if (wanted.request_id is None) != bool(wanted.abort_all):
        raise RequestError("give one of request_id and abort_all", param="request_id")
    num_aborted = service.traffic.abort(wanted.request_id, besides=exchange_of_request())
    service.port.abort_elsewhere(wanted.request_id)
    return json_reply({"status": "ok", "aborted": num_aborted})


async def profile(service: Service, action: Literal["start", "stop"]) -> Response:
    """Starts or stops the CUDA profiler of the engine's process.

    Raises: RequestError; NoProfilerError, 501, where that has no CUDA; EngineStoppedError, EngineDeadError.
    """
    require_admin(service)
    await service.port.profile(action)
    return json_reply({"status": "ok", "action": f"{action}_profile"})


def _phase(service: Service) -> Response:
    return json_reply({"status": "ok", "phase": str(service.port.phase)})
