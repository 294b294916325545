"""Errors as clients see them."""

import json
import logging
from typing import Any

import pytest
from werkzeug.exceptions import BadGateway, MethodNotAllowed, NotFound, RequestEntityTooLarge

from megallm.core_async.errors import EngineBusy, EngineDeadError, LifecycleError, RequestFailedError
from megallm.http.errors import RequestError, error_object, refusal_of


def told(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:  # Any: JSON
    """Gives status, error and headers."""
    refusal = refusal_of(error)
    assert refusal.headers.pop("Content-Type") == "application/json"
    return refusal.status, json.loads(refusal.body)["error"], refusal.headers


def test_a_refused_request_is_told_where_and_why() -> None:
    """The openai client shows all four fields."""
    error = RequestError("no", param="a[0]", code="c", status=404, headers={"X": "y"})
    assert told(error) == (
        404,
        {"message": "no", "type": "not_found_error", "param": "a[0]", "code": "c"},
        {"X": "y"},
    )


def test_a_busy_engine_is_asked_again_later() -> None:
    """Clients wait as long as the header says."""
    status, error, headers = told(EngineBusy("full"))
    assert (status, error["type"], headers) == (429, "rate_limit_error", {"Retry-After": "1"})


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineDeadError("CUDA error at 0x7f00"), 503),
        (RequestFailedError("at 0x7f00"), 500),
        (RuntimeError("secret 0x7f00"), 500),
        (KeyError("0x7f00"), 500),
    ],
)
def test_nothing_of_a_failure_is_repeated(
    error: Exception, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts of exceptions hold addresses and paths; the log has them."""
    with caplog.at_level(logging.ERROR):
        seen, body, _ = told(error)
    assert seen == status
    assert "0x7f00" not in json.dumps(body)
    assert body["type"] in ("service_unavailable_error", "server_error")
    assert (status == 503) != bool(caplog.records)


def test_our_own_words_are_told() -> None:
    """They were written for the client."""
    status, error, _ = told(LifecycleError("not now"))
    assert (status, error["message"], error["type"]) == (409, "not now", "conflict_error")
    assert told(RequestError("no profiler", status=501))[1]["message"] == "no profiler"


@pytest.mark.parametrize("error", [NotFound(), RequestEntityTooLarge(), BadGateway()])
def test_the_frameworks_errors_are_json(error: Any) -> None:  # Any: an HTTPException
    """It would answer in HTML."""
    assert told(error)[0] == error.code


def test_a_wrong_method_is_told_the_right_ones() -> None:
    """HTTP wants the header."""
    assert told(MethodNotAllowed(["POST", "OPTIONS"]))[2] == {"Allow": "OPTIONS, POST"}


def test_a_stream_gets_the_same_object() -> None:
    """The client reads it in band."""
    assert error_object(EngineBusy("full")) == refusal_of(EngineBusy("full")).body
