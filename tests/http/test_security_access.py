"""Who gets in: without the key nobody, whatever the path, the method and the Host look like."""

import ast
import inspect
from typing import Final
from urllib.parse import unquote

import pytest

from megallm.http import auth
from megallm.http.auth import OPEN_PATHS
from megallm.http.service import AppSettings
from tests.http.serving import serving
from tests.http.walled import KEY, Walled, walled

pytestmark = pytest.mark.anyio

on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""The loop has no say in what a thousand paths are."""
HOSTS: Final = [
    "evil.example",
    "localhost/health?",
    "test#/health",
    "/health",
    "health",
    "[::1]/health",
    "a" * 2000,
    "",
]


async def routes() -> dict[str, set[str]]:
    """Gives every route of the app, and its methods."""
    found: dict[str, set[str]] = {}
    async with serving(settings=AppSettings()) as served:
        for rule in served.app.url_map.iter_rules():
            path = rule.rule.replace("<path:name>", "fake")
            found.setdefault(path, set()).update(rule.methods or ())
    assert len(found) > 20, found
    return found


def forms(path: str) -> list[str]:
    """Gives ways to spell a path that some server somewhere takes for it, or for one that is open."""
    return [
        path,
        f"/{path}",
        f"{path}/",
        path.upper(),
        f"http://test{path}",
        f"http://test/health?{path}",
        f"/.{path}",
        f"/health/..{path}",
        f"/health/%2e%2e{path}",
        f"/health%2f..{path}",
        f"/health;{path}",
        f"/health%00{path}",
        f"/health%3f{path}",
        f"/health/{path}",
        path.replace("v1", "%76%31"),
        f"{path}%20",
        f"{path}?path=/health",
        f"{path}#/health",
        f"{path};/health",
    ]


@on_asyncio
async def test_no_path_gets_in_without_the_key() -> None:
    """CVE-2026-48746, vllm#18892: one URL was checked and another routed; some routes were never checked."""
    async with walled() as wall:
        for path, methods in (await routes()).items():
            targets = [
                target for target in forms(path) if unquote(target.partition("?")[0]) not in OPEN_PATHS
            ]
            for target in targets:
                for method in methods & {"GET", "POST"} or {"GET"}:
                    reply = await wall.ask(method, target, key=None)
                    assert reply.status == 401, f"{method} {target}: {reply}"
        assert wall.served.engine.stats().step == 0


@on_asyncio
@pytest.mark.parametrize(
    "method", ["HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "get", "POST", "FOO"]
)
async def test_no_method_gets_in_without_the_key(method: str) -> None:
    """A web framework answers HEAD and OPTIONS by itself, often before anybody asks for a key."""
    async with walled() as wall:
        for path in await routes():
            if path not in OPEN_PATHS:
                assert (await wall.ask(method, path, key=None)).status == 401, path
        assert wall.served.engine.stats().step == 0


@pytest.mark.parametrize("host", HOSTS)
async def test_no_host_gets_in_without_the_key(host: str) -> None:
    """CVE-2026-48746: a URL that is put together from the Host header says what its sender likes."""
    async with walled() as wall:
        for path in ("/v1/models", "/metrics", "/"):
            reply = await wall.ask("GET", path, f"Host: {host}", key=None)
            assert reply.status == 401, reply
        for header in ("X-Forwarded-Prefix: /health", "X-Original-URL: /health", "X-Rewrite-URL: /health"):
            assert (await wall.ask("GET", "/v1/models", header, key=None)).status == 401


async def test_only_health_is_open_and_says_no_more_than_that() -> None:
    """A balancer has no key."""
    async with walled() as wall:
        for path in OPEN_PATHS:
            reply = await wall.ask("GET", path, key=None)
            assert reply.status == 200
            assert KEY.encode() not in reply.body
            assert (await wall.ask("POST", path, key=None)).status == 405


@pytest.mark.parametrize(
    "header",
    [
        "Authorization: Bearer ",
        "Authorization: Bearer",
        f"Authorization: Basic {KEY}",
        f"Authorization: {KEY}",
        f"Authorization: Bearer {KEY}x",
        f"Authorization: Bearer {KEY[:-1]}",
        f"Authorization: Bearer {KEY.upper()}",
        f"Authorization: Bearer {KEY}, Bearer x",
        f"Authorization: Bearer x\r\nAuthorization: Bearer {KEY}",
        f"Authorization: Bearer \u00e9{KEY}",
        f"X-Api-Key: {KEY}",
        f"Cookie: key={KEY}",
    ],
)
async def test_no_other_key_gets_in(header: str) -> None:
    """Nothing that is close, and nothing that is elsewhere."""
    async with walled() as wall:
        reply = await wall.ask("GET", "/v1/models", header, key=None)
        assert reply.status == 401
        assert KEY not in reply.head + reply.body.decode()


def test_the_key_is_compared_in_constant_time_and_no_other_way() -> None:
    """CVE-2025-59425: `==` ends at the first byte that differs, which a clock can see."""
    tree = ast.parse(inspect.getsource(auth.check_key))
    compared = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    assert "hmac.compare_digest(key.strip(), api_key.encode())" in ast.unparse(tree)
    assert not [each for each in compared if "api_key" in each and "is None" not in each], compared


async def test_a_preflight_opens_nothing() -> None:
    """It is answered without a key, as browsers send none; the route itself is not reached."""
    for origins, status in (((), 403), (("http://page",), 204)):
        told = AppSettings(model_name="fake", api_key=KEY, cors_origins=origins)
        async with walled(settings=told) as wall:
            asks = ("Origin: http://page", "Access-Control-Request-Method: POST")
            reply = await wall.ask("OPTIONS", "/pause", *asks, key=None)
            assert (reply.status, reply.body) == (status, b"")
            assert (await wall.ask("POST", "/pause", *asks, key=None)).status == 401
            assert wall.served.engine.phase == "running"
            for half in asks:
                assert (await wall.ask("OPTIONS", "/pause", half, key=None)).status == 401


async def test_another_protocol_opens_nothing() -> None:
    """A WebSocket or HTTP/2 comes to the app by another way."""
    async with walled() as wall:
        for path in ("/v1/models", "/v1/completions", "/health"):
            handshake = (
                "Upgrade: websocket",
                "Sec-WebSocket-Version: 13",
                "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
            )
            reply = await said_with_upgrade(wall, path, *handshake)
            assert reply in range(400, 500), path
        assert wall.served.engine.stats().step == 0


async def said_with_upgrade(wall: Walled, path: str, *headers: str) -> int:
    """Gives the status of a request to change the protocol."""
    lines = [f"GET {path} HTTP/1.1", "Host: test", "Connection: Upgrade", *headers, "", ""]
    return (await wall.say("\r\n".join(lines).encode())).status


async def test_routes_for_administrators_need_a_server_with_a_key() -> None:
    """vllm#18892: without one, everybody who reaches the port could stop the model."""
    async with walled(settings=AppSettings(model_name="fake")) as wall:
        del wall.served.client.headers["Authorization"]
        for path in await routes():
            name = path.removeprefix("/v1").strip("/")
            if name in {"pause", "unpause", "suspend", "resume", "abort", "start_profile", "stop_profile"}:
                assert (await wall.ask("POST", path, body=b'{"abort_all": true}')).status == 403, path
        assert wall.served.engine.phase == "running"
