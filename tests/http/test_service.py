"""What every route shares."""

import msgspec
import pytest

from megallm.core_async.errors import EngineBusy, EngineStoppedError
from megallm.core_async.messages import NewRequest, Sampling, TextSpec, pack_ints
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.http.service import AppSettings, Bounds, Service
from megallm.http.traffic import DrainingError
from tests.http.serving import Served, serving

pytestmark = pytest.mark.anyio


def test_settings_travel_to_other_processes() -> None:
    """As msgpack, whole."""
    settings = AppSettings(
        model_name="m", api_key="k", parsers=("hermes",), cors_origins=("*",), bounds=Bounds(max_n=3)
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=AppSettings) == settings


def service_of(served: Served, bounds: Bounds | None = None) -> Service:
    """Gives a service over a running engine."""
    settings = AppSettings(model_name="m", model_aliases=("n",), bounds=bounds or Bounds())
    return Service(
        served.engine,
        TokenizerAdapter(served.tokenizer),
        settings,
        metrics=served.counts,
        traffic=served.traffic,
    )


def request_of(served: Served) -> NewRequest:
    """Gives a request for a long answer."""
    request_id = served.engine.next_request_id()
    spec = TextSpec(request_id)
    return NewRequest(request_id, pack_ints([1, 2]), 400, (), Sampling(temperature=0.0), spec)


async def test_what_was_submitted_ends_with_the_exchange() -> None:
    """Whoever forgets to close it loses nothing."""
    async with serving() as served:
        service = service_of(served)
        assert service.model_names == ("m", "n")
        with served.traffic.open("a") as exchange:
            outbox = await service.submit(exchange, [request_of(served)])
            assert not outbox.is_closed
        assert outbox.is_closed


async def test_a_server_that_stops_takes_nothing() -> None:
    """Each way of stopping has its error."""
    async with serving(checks_idle=False) as served:
        service = service_of(served, Bounds(max_waiting=1))
        with served.traffic.open("a") as exchange:
            with pytest.raises(EngineBusy, match="limit is 1"):
                await service.submit(exchange, [request_of(served), request_of(served)])
            exchange.cut(lambda: DrainingError("cut"))
            with pytest.raises(DrainingError, match="cut"):
                await service.submit(exchange, [request_of(served)])
        served.traffic.begin_drain()
        with pytest.raises(DrainingError):
            service.check_open()
        served.traffic.is_draining = False
        await served.engine.shutdown()
        with pytest.raises(EngineStoppedError):
            service.check_open()
