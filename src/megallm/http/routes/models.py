"""GET /v1/models and /health: what is served, and whether it is ready."""

from quart import Response

from megallm.core_async.plan.phases import Phase
from megallm.http.answers.replies import check_model, json_reply
from megallm.http.service import Service

READY = frozenset({Phase.RUNNING, Phase.UNPAUSING})
"""Where new requests begin at once; in the other phases they wait for somebody, or are refused."""


def list_models(service: Service) -> Response:
    """Gives the served names."""
    return json_reply({"object": "list", "data": [_model(service, name) for name in service.model_names]})


def show_model(service: Service, name: str) -> Response:
    """Gives one of the served names.

    Raises: RequestError, 404, naming what is served.
    """
    check_model(service, name)
    return json_reply(_model(service, name))


def show_health(service: Service) -> Response:
    """Says whether the server takes requests and runs them: 200, else 503 with the reason."""
    phase, stats = service.port.phase, service.port.stats()
    is_draining = service.traffic.is_draining
    is_ready = phase in READY and not is_draining
    status = "ok" if is_ready else "draining" if is_draining else str(phase)
    body = {
        "status": status,
        "service": "megallm",
        "ready": is_ready,
        "running": stats.running,
        "waiting": stats.waiting,
    }
    return json_reply(body, 200 if is_ready else 503)


def show_metrics(service: Service) -> Response:
    """Gives the counts for Prometheus."""
    body, content_type = service.metrics.render()
    return Response(body, content_type=content_type)


def _model(service: Service, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "megallm",
        "root": service.settings.model_name,
        "parent": None,
        "max_model_len": service.port.config.max_sequence_length,
    }
