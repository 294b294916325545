"""The HTTP suite: the load it makes is the load it says, and its figures are of the processes it names."""

import argparse
import os

import anyio
import pytest

from benchmarks import http
from benchmarks.http_load import load, percentiles
from tests.http.sites import site


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_clients_take_every_answer_whole() -> None:
    """A figure of streams that were cut short would be too good."""
    async with site(0) as here:
        streams = await load(here.server.port, 3, 2, 5, is_streamed=True)
        assert (streams.num_requests, streams.num_tokens) == (6, 30)
        answers = await load(here.server.port, 3, 2, 1, is_streamed=False)
        assert (answers.num_requests, answers.num_writes) == (6, 0)
        assert 0 < answers.first_token_ms["p50"] <= answers.first_token_ms["p99"]


def test_percentiles_are_values_that_were_seen() -> None:
    """An interpolated latency is nobody's."""
    assert percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p90": 3.0, "p99": 3.0}
    assert percentiles([]) == {"p50": 0.0, "p90": 0.0, "p99": 0.0}


def test_the_cpu_time_of_a_process_is_read() -> None:
    """It is what the suite divides by."""
    own = os.times()
    assert http.cpu_s(os.getpid()) == pytest.approx(own.user + own.system, abs=0.1)


def test_a_run_gives_a_row_for_each_load() -> None:
    """The suite is run by people who wait for its table."""
    options = argparse.Namespace(streams=[2], front_ends=0, tokens=32, requests=2)
    rows = anyio.run(http.measure, options, 0.0)
    assert [(row["kind"], row["clients"]) for row in rows] == [("stream", 2), ("request", 2)]
    assert all(row["tok_per_cpu_s"] is None for row in rows)  # no process to measure
