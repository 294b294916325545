"""What goes round every request: ids, keys, header bounds, cross-origin pages, the log line."""

import json
import logging

import pytest

from megallm.http.service import AppSettings, Bounds
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

C = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
ORIGIN = "https://page.example"


async def test_a_request_id_goes_out_as_it_came_in() -> None:
    """It joins the logs of both sides; one that is no id is replaced."""
    async with serving() as served:
        response = await served.post(C, BODY, x_request_id="my-id.7")
        assert response.headers["x-request-id"] == "my-id.7"
        for odd in ("a b", "x" * 129, 'a"b'):
            response = await served.post(C, BODY, x_request_id=odd)
            assert response.headers["x-request-id"] != odd
            assert len(response.headers["x-request-id"]) == 32
        assert len((await served.client.get("/nothing")).headers["x-request-id"]) == 32


async def test_without_the_key_there_is_only_health() -> None:
    """Whatever the route, known or not, and before the body is read."""
    settings = AppSettings(api_key="k")
    async with serving(settings=settings, checks_idle=False) as served:
        for path in ("/", "/v1/models", "/metrics", "/nothing", "/v1/completions"):
            response = await served.client.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await served.post(C, b"x" * 100)).status_code == 401
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.post(C, BODY, authorization="Bearer k")).status_code == 200
        assert served.traffic.num_open == 0


async def test_headers_that_are_too_long_are_refused() -> None:
    """The server in front lets more through than it says."""
    async with serving(bounds=Bounds(max_header_bytes=500)) as served:
        response = await served.client.get("/v1/models", headers={"x-long": "y" * 600})
        assert (response.status_code, "500" in response.json()["error"]["message"]) == (431, True)


async def test_pages_of_named_origins_may_call() -> None:
    """Their preflight needs no key, since browsers send none with it."""
    settings = AppSettings(cors_origins=(ORIGIN,), api_key="k")
    async with serving(settings=settings, checks_idle=False) as served:
        asking = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
        response = await served.client.options(C, headers=asking)
        assert response.status_code == 204
        assert response.headers["access-control-allow-origin"] == ORIGIN
        response = await served.client.options(C, headers={**asking, "Origin": "https://other.example"})
        assert (response.status_code, "access-control-allow-origin" in response.headers) == (403, False)
        response = await served.post(C, BODY, origin=ORIGIN, authorization="Bearer k")
        assert response.headers["access-control-allow-origin"] == ORIGIN
        response = await served.post(C, BODY, origin=ORIGIN)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, ORIGIN)


async def test_a_line_is_logged_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    """With what it cost, also where it was refused."""
    async with serving() as served:
        with caplog.at_level(logging.INFO, logger="megallm.http.access_log"):
            await served.post(C, {**BODY, "n": 2}, x_request_id="one")
            await served.post(C, b"{", x_request_id="two")
    lines = [json.loads(record.getMessage()) for record in caplog.records if "access" in record.name]
    assert (lines[0]["request_id"], lines[0]["status"], lines[0]["path"]) == ("one", 200, C)
    assert (lines[0]["prompt_tokens"], lines[0]["output_tokens"]) == (1, 4)
    assert lines[0]["finished"] == {"length": 2}
    assert (lines[1]["request_id"], lines[1]["status"]) == ("two", 400)
    assert "client_left" not in lines[0]


async def test_a_verbose_server_logs_parameters(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever looks for what a client sends finds it there; texts are never logged."""
    async with serving(settings=AppSettings(verbose=True), checks_idle=False) as served:
        with caplog.at_level(logging.INFO, logger="megallm.http.access_log"):
            await served.post(C, {**BODY, "prompt": "secret", "logit_bias": {"5": 1}})
    (line,) = [json.loads(record.getMessage()) for record in caplog.records if "access" in record.name]
    assert (line["params"]["temperature"], line["params"]["logit_bias"]) == (0.0, {"5": 1.0})
    assert "secret" not in json.dumps(line)
