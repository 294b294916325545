"""What is served, and whether it is ready."""

import pytest

from megallm.http.service import AppSettings
from tests.http.asgi_call import AsgiCall
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

BODY = {"prompt": "a", "max_tokens": 1}


async def test_the_served_names_are_listed_and_taken() -> None:
    """Clients pick one of the list; aliases let them keep a name."""
    async with serving(settings=AppSettings(model_name="m/one", model_aliases=("other",))) as served:
        reply = (await served.client.get("/v1/models")).json()
        assert [model["id"] for model in reply["data"]] == ["m/one", "other"]
        assert reply["data"][0]["max_model_len"] == served.engine.config.max_sequence_length
        assert (await served.client.get("/models/m/one")).json()["id"] == "m/one"
        for name in ("m/one", "other", None, ""):
            assert (await served.json("/v1/completions", {**BODY, "model": name}))["model"] == "m/one"


async def test_another_name_is_told_what_there_is() -> None:
    """The most frequent mistake of a new user."""
    async with serving(settings=AppSettings(model_name="m/one")) as served:
        error = await served.refused("/v1/completions", {**BODY, "model": "gpt"}, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "m/one" in error["message"]
        response = await served.client.get("/v1/models/gpt")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        long = await served.refused("/v1/completions", {**BODY, "model": "x" * 5000}, 404)
        assert len(long["message"]) < 500


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_is_what_a_balancer_should_do(path: str) -> None:
    """Requests to a paused, draining or dead server would wait, or be refused."""
    async with serving(checks_idle=False) as served:
        response = await served.client.get(path)
        assert (response.status_code, response.json()["ready"]) == (200, True)
        await served.engine.pause()
        response = await served.client.get(path)
        assert (response.status_code, response.json()["status"]) == (503, "paused")
        await served.engine.unpause()
        assert (await served.client.get(path)).status_code == 200
        served.traffic.begin_drain()
        response = await served.client.get(path)
        assert (response.status_code, response.json()["status"]) == (503, "draining")
        await served.engine.shutdown()
        assert (await served.client.get(path)).status_code == 503


async def test_a_draining_server_refuses_what_is_new_and_ends_what_is_old() -> None:
    """A stream gets one error frame, and no `[DONE]`."""
    async with serving(checks_idle=False) as served:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        call = AsgiCall(served, "/v1/completions", body)
        await call.until_chunks(2)
        served.traffic.begin_drain()
        assert (await served.refused("/v1/completions", BODY, 503))["type"] == "service_unavailable_error"
        served.traffic.cut()
        last = (await call.ended()).rstrip().rpartition(b"data: ")[2]
        assert b"stopping" in last
        await served.traffic.wait_idle()


async def test_metrics_are_the_recorders() -> None:
    """Prometheus reads the content type."""
    async with serving() as served:
        response = await served.client.get("/metrics")
        assert (response.text, response.headers["content-type"]) == (
            "# nothing\n",
            "text/plain; version=0.0.4",
        )
