"""Who may ask: one key, compared in constant time, decided on the path that the server routes by."""

import base64
import binascii
import hmac
from collections.abc import Iterable
from typing import Final

from megallm.http.errors import RequestError

OPEN_PATHS: Final = frozenset({"/health", "/v1/health"})
"""What a load balancer asks without a key."""
PAGE_PATH: Final = "/"
"""What a browser opens, which can send a key as the password of a dialogue only. The key is taken so
here alone: browsers send such passwords along unasked, also where another site's page makes them."""


def check_key(path: str, headers: Iterable[tuple[bytes, bytes]], api_key: str | None) -> None:
    """Checks the key of a request. `headers`: as ASGI gives them, names in small letters.

    Raises: RequestError, 401, when a key is needed and another one, several or none came.
    """
    if api_key is None or path in OPEN_PATHS:
        return
    given = [value for name, value in headers if name == b"authorization"]
    scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    is_page = path == PAGE_PATH
    if is_page and scheme.lower() == b"basic":
        scheme, key = b"bearer", _password(key)
    is_right = hmac.compare_digest(key.strip(), api_key.encode())
    if not (is_right and scheme.lower() == b"bearer"):
        raise RequestError(
            "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            status=401,
            headers={"WWW-Authenticate": 'Basic realm="megallm: the API key is the password"'}
            if is_page
            else {"WWW-Authenticate": "Bearer"},
        )


def _password(credentials: bytes) -> bytes:
    """Gives the password of `user:password` in Base64; empty where it is none."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
