"""One line for each request that has ended."""

import json
import logging

import pytest

from megallm.http.access_log import log_access


def logged(
    caplog: pytest.LogCaptureFixture, path: str = "/v1/completions", status: int | None = 200
) -> list[logging.LogRecord]:
    """Gives the records of one request."""
    with caplog.at_level(logging.DEBUG, logger="megallm.http.access_log"):
        log_access(
            method="POST",
            path=path,
            status=status,
            seconds=0.12345,
            request_id="r",
            noted={"output_tokens": 3},
        )
    return caplog.records


def test_a_line_is_json_with_all_that_was_noted(caplog: pytest.LogCaptureFixture) -> None:
    """Collectors parse it; handlers find the same as a dict."""
    (record,) = logged(caplog)
    expected = {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "seconds": 0.1235,
        "request_id": "r",
        "output_tokens": 3,
    }
    assert json.loads(record.getMessage()) == expected == getattr(record, "access", None)
    assert record.levelno == logging.INFO


def test_nobody_writes_lines_of_his_own(caplog: pytest.LogCaptureFixture) -> None:
    """A path may hold a line break, and may be very long."""
    (record,) = logged(caplog, "/x\n2026 ERROR all is lost\x1b[31m" + "y" * 1000)
    message = record.getMessage()
    assert "\n" not in message
    assert "\x1b" not in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        ("/health", 200, logging.DEBUG),
        ("/metrics", 200, logging.DEBUG),
        ("/health", 503, logging.INFO),
        ("/v1/models", None, logging.INFO),
    ],
)
def test_what_machines_ask_all_the_time_is_quiet(
    caplog: pytest.LogCaptureFixture, path: str, status: int | None, level: int
) -> None:
    """Unless something is wrong."""
    (record,) = logged(caplog, path, status)
    assert record.levelno == level
