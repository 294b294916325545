"""One key, needed everywhere but at /health."""

import pytest

from megallm.http.auth import check_key
from megallm.http.errors import RequestError

KEY = "sk-secret-é"
RIGHT = (b"authorization", b"Bearer " + KEY.encode())


@pytest.mark.parametrize(
    "value", [b"Bearer " + KEY.encode(), b"bearer " + KEY.encode(), b"Bearer  " + KEY.encode()]
)
def test_the_right_key_opens(value: bytes) -> None:
    """The scheme's case does not matter."""
    check_key("/v1/models", [(b"host", b"x"), (b"authorization", value)], KEY)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer " + KEY.encode()[:-1])],
        [(b"authorization", b"Bearer " + KEY.encode() + b"x")],
        [(b"authorization", b"Basic " + KEY.encode())],
        [(b"authorization", b"Bearer \xff\xfe")],
        [RIGHT, (b"authorization", b"Bearer other")],
        [(b"x-api-key", KEY.encode())],
    ],
)
@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/", "/metrics", "/health/", "//health", "/v1/health/x", "/HEALTH", "http://x/health"],
)
def test_anything_else_is_401(path: str, headers: list[tuple[bytes, bytes]]) -> None:
    """Also on paths that look like the open one."""
    with pytest.raises(RequestError) as caught:
        check_key(path, headers, KEY)
    assert (caught.value.http_status, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.headers["WWW-Authenticate"] == "Bearer"


def test_health_and_servers_without_a_key_are_open() -> None:
    """A load balancer has no key."""
    for path in ("/health", "/v1/health"):
        check_key(path, [], KEY)
    check_key("/v1/models", [], None)
