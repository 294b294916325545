"""Which web pages may call: cross-origin requests from the origins that the settings name."""

from collections.abc import Mapping
from typing import Final

ANY: Final = "*"
MAX_AGE_S: Final = 600
"""How long a browser need not ask again."""


def cors_headers(origin: str | None, origins: tuple[str, ...]) -> dict[str, str]:
    """Gives the headers that let a page of an origin read a response; none where it may not."""
    if origin is None or not (ANY in origins or origin in origins):
        return {}
    allowed = {} if ANY in origins else {"Vary": "Origin"}
    return {
        "Access-Control-Allow-Origin": ANY if ANY in origins else origin,
        "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
        **allowed,
    }


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    """Whether a browser asks if a page may make a request."""
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def preflight_headers(headers: Mapping[str, str], origins: tuple[str, ...]) -> dict[str, str]:
    """Gives what answers a preflight beside `cors_headers`; none where the origin may not call."""
    if not cors_headers(headers.get("origin"), origins):
        return {}
    return {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "*"),
        "Access-Control-Max-Age": str(MAX_AGE_S),
    }
