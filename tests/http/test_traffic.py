"""What is under way: counted, waited for, and ended early."""

from collections.abc import Callable

import anyio
import pytest

from megallm.http.traffic import AbortedError, DrainingError, Traffic


class Reading:
    """What an exchange reads from."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.is_closed = False

    def fail(self, make_error: Callable[[], Exception]) -> None:
        self.errors.append(make_error())

    def close(self) -> None:
        self.is_closed = True


def test_what_an_exchange_reads_from_is_closed_at_its_end() -> None:
    """However it ends: nothing goes on for a client that has left."""
    traffic, reading, ended = Traffic(), Reading(), list[str]()

    def fail() -> None:
        with traffic.open("a") as exchange:
            exchange.reads(reading)
            exchange.on_close(lambda: ended.append("once"))
            assert (traffic.num_open, reading.is_closed) == (1, False)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (traffic.num_open, reading.is_closed, ended) == (0, True, ["once"])


def test_a_cut_ends_what_is_read_now_and_what_comes_later() -> None:
    """One frame tells the reader; a request that has not begun yet gets the error at once."""
    traffic = Traffic()
    with traffic.open("a") as exchange:
        now, later = Reading(), Reading()
        exchange.check()
        exchange.reads(now)
        traffic.cut()
        traffic.cut()
        assert [type(error) for error in now.errors] == [DrainingError]
        with pytest.raises(DrainingError):
            exchange.check()
        with pytest.raises(DrainingError):
            exchange.reads(later)
        assert later.is_closed


def test_an_abort_takes_those_of_one_id_or_all() -> None:
    """Clients choose the ids, so several requests may have one."""
    traffic = Traffic()
    with traffic.open("a") as first, traffic.open("a") as second, traffic.open("b") as third:
        assert traffic.abort("c") == 0
        assert traffic.abort("a") == 2
        for exchange in (first, second):
            with pytest.raises(AbortedError):
                exchange.check()
        third.check()
        assert traffic.abort(None, besides=first) == 2
        with pytest.raises(AbortedError):
            third.check()


@pytest.mark.anyio
async def test_idle_is_waited_for() -> None:
    """A drain waits for the last response, and for nothing where there is none."""
    traffic, order = Traffic(), list[str]()
    await traffic.wait_idle()

    async def wait() -> None:
        await traffic.wait_idle()
        order.append("idle")

    async with anyio.create_task_group() as tasks:
        with traffic.open("a"):
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            with traffic.open("b"):
                pass
            await anyio.wait_all_tasks_blocked()
            traffic.begin_drain()
            assert (order, traffic.is_draining) == ([], True)
    assert order == ["idle"]
