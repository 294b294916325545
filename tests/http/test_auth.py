"""One key, needed everywhere but at /health."""

import base64

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
    scheme = "Basic" if path == "/" else "Bearer"
    assert caught.value.headers["WWW-Authenticate"].split()[0] == scheme


def basic(password: str) -> list[tuple[bytes, bytes]]:
    """Gives the header that a browser sends after its dialogue."""
    return [(b"authorization", b"Basic " + base64.b64encode(f"anyone:{password}".encode()))]


def test_a_browser_opens_the_page_with_the_key_as_password() -> None:
    """It has no other way to send a key; without one its page, with the field for the key, stays shut."""
    check_key("/", basic(KEY), KEY)


@pytest.mark.parametrize("password", ["", KEY[:-1], KEY + "x"])
def test_another_password_keeps_the_page_shut(password: str) -> None:
    """The page is no way round the key."""
    with pytest.raises(RequestError):
        check_key("/", basic(password), KEY)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/metrics", "//"])
def test_a_password_opens_nothing_but_the_page(path: str) -> None:
    """Browsers send it along with what another site's page asks for."""
    with pytest.raises(RequestError):
        check_key(path, basic(KEY), KEY)


def test_health_and_servers_without_a_key_are_open() -> None:
    """A load balancer has no key."""
    for path in ("/health", "/v1/health"):
        check_key(path, [], KEY)
    check_key("/v1/models", [], None)
