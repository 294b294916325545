"""Routes for whoever runs the server."""

import json

import httpx
import pytest

from megallm.http.service import AppSettings
from tests.device.profilers import FakeProfiler
from tests.http.asgi_call import AsgiCall
from tests.http.serving import Served, serving

pytestmark = pytest.mark.anyio

KEYED = AppSettings(api_key="k")
KEY = (("authorization", "Bearer k"),)
ROUTES = ["pause", "unpause", "suspend", "resume", "abort", "v1/start_profile", "v1/stop_profile"]


async def call(served: Served, path: str, body: object = None) -> httpx.Response:
    """Posts with the key."""
    return await served.post(path, b"" if body is None else body, authorization="Bearer k")


@pytest.mark.parametrize("name", ROUTES)
async def test_a_server_without_a_key_has_none(name: str) -> None:
    """Everybody could stop it."""
    async with serving() as served:
        assert (await served.refused(f"/{name}", {}, 403))["type"] == "permission_error"


async def test_the_lifecycle_is_the_engines() -> None:
    """With its own errors where a call is not legal."""
    async with serving(settings=KEYED, checks_idle=False) as served:
        for name, phase in [
            ("pause", "paused"),
            ("unpause", "running"),
            ("suspend", "suspended"),
            ("resume", "paused"),
        ]:
            assert (await call(served, f"/{name}")).json() == {"status": "ok", "phase": phase}
        assert (await call(served, "/pause", {"mode": "abort"})).json()["phase"] == "paused"
        assert (await call(served, "/pause", {"mode": "x"})).json()["error"]["param"] == "mode"
        await call(served, "/suspend")
        response = await call(served, "/unpause")
        assert (response.status_code, response.json()["error"]["type"]) == (409, "conflict_error")


async def test_an_abort_ends_the_requests_of_an_id() -> None:
    """A stream gets an error frame; its blocks are free."""
    async with serving(settings=KEYED, checks_idle=False) as served:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        one = AsgiCall(served, "/v1/completions", body, headers=[*KEY, ("x-request-id", "one")])
        two = AsgiCall(served, "/v1/completions", body, headers=[*KEY, ("x-request-id", "two")])
        await one.until_chunks(2)
        await two.until_chunks(2)
        assert (await call(served, "/abort", {"request_id": "one"})).json()["aborted"] == 1
        last = (await one.ended()).rstrip().rpartition(b"data: ")[2]
        assert "aborted" in json.loads(last)["error"]["message"]
        assert not two.has_ended.is_set()
        assert (await call(served, "/abort", {"request_id": "one"})).json()["aborted"] == 0
        assert (await call(served, "/abort", {"abort_all": True})).json()["aborted"] == 1
        await two.ended()
        for body in ({}, {"request_id": "a", "abort_all": True}):
            assert (await call(served, "/abort", body)).status_code == 400


async def test_a_profiler_records_what_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so where there is no CUDA instead of doing nothing."""
    async with serving(settings=KEYED, checks_idle=False) as served:
        profiler = FakeProfiler.installed(monkeypatch)
        for action in ("start", "stop"):
            response = await call(served, f"/v1/{action}_profile")
            assert response.json() == {"status": "ok", "action": f"{action}_profile"}
        assert profiler.told == ["start", "stop"]
        FakeProfiler.installed(monkeypatch, refusal="not permitted")
        response = await call(served, "/v1/start_profile")
        assert (response.status_code, response.json()["error"]["type"]) == (501, "server_error")
