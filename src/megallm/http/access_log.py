"""One line of JSON for each request that has ended, through logging."""

import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec

log = logging.getLogger(__name__)

QUIET: Final = frozenset({"/health", "/v1/health", "/metrics"})
"""What machines ask every few seconds: logged at DEBUG while it goes well."""
MAX_PATH: Final = 256
FAILED: Final = 400
"""Statuses from here on are errors."""


def log_access(
    *,
    method: str,
    path: str,
    status: int | None,
    seconds: float,
    request_id: str,
    noted: Mapping[str, Any],  # Any: numbers and texts
) -> None:
    """Logs a request that has ended. `status` None: the client left before there was one.

    The record's `access` has the same as a dict, for handlers that want it.
    """
    line: dict[str, Any] = {
        "method": method,
        "path": path[:MAX_PATH],
        "status": status,
        "seconds": round(seconds, 4),
        "request_id": request_id,
        **noted,
    }
    is_well = status is not None and status < FAILED
    level = logging.DEBUG if path in QUIET and is_well else logging.INFO
    if log.isEnabledFor(level):
        # JSON escapes line breaks and control characters, so that nobody writes lines of their own
        log.log(level, "%s", msgspec.json.encode(line).decode(), extra={"access": line})
