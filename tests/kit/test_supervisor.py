"""The supervisor: starts in order, stops in reverse, one failure ends all, and one error comes out."""

import anyio
import pytest

from megallm.core_async.errors import ActorGone
from megallm.core_async.kit.supervisor import Supervisor
from tests.kit.children import STARTED, STOPPED, Child, Count, Counter, Pump, start_all, three

pytestmark = pytest.mark.anyio


async def test_children_start_in_order_and_each_is_ready_before_the_next() -> None:
    """Whoever is asked must be there before whoever asks."""
    log, children = three()
    supervisor = Supervisor()
    async with supervisor:
        await start_all(supervisor, children)
        assert log == STARTED


async def test_they_stop_in_the_opposite_order_and_each_has_ended_before_the_next() -> None:
    """Whoever asks must be gone before whoever is asked."""
    log, children = three()
    supervisor = Supervisor()
    async with supervisor:
        await start_all(supervisor, children)
        log.clear()
        await supervisor.stop()
        assert log == STOPPED
        await supervisor.stop()
    assert log == STOPPED
    assert supervisor.failure is None


async def test_two_stops_at_once_stop_each_child_once() -> None:
    """A shutdown may come from two places."""
    log, children = three()
    supervisor = Supervisor()
    async with supervisor:
        await start_all(supervisor, children)
        log.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.stop)
            tasks.start_soon(supervisor.stop)
        assert log == STOPPED


async def test_leaving_the_block_stops_in_order_too() -> None:
    """The order must not depend on how the end came."""
    log, children = three()
    supervisor = Supervisor()
    async with supervisor:
        await start_all(supervisor, children)
        log.clear()
    assert log == STOPPED


async def test_a_failure_ends_all_in_order_and_comes_out_as_it_is() -> None:
    """The caller sees one error, the first, and not a group; its cause is kept."""
    log, children = three()
    failures: list[Exception] = []
    error = ValueError("broken")
    error.__cause__ = KeyError("why")
    supervisor = Supervisor(failures.append)

    async def block() -> None:
        async with supervisor:
            await start_all(supervisor, children)
            log.clear()
            children[1].fail(error)
            await anyio.sleep_forever()

    with pytest.raises(ValueError, match="broken") as caught:
        await block()
    assert log == ["b ended", "c ended", "a ended"]
    assert caught.value is error
    assert isinstance(error.__cause__, KeyError)
    assert failures == [error]
    assert supervisor.failure is error


async def test_failures_that_follow_from_the_first_are_not_reported() -> None:
    """One that asks the failed one fails as well, with an error that says less."""
    counter = Counter()
    counter.max = 3
    between = Child("between", [])
    between.stop_error = KeyError("on stop")
    failures: list[Exception] = []
    supervisor = Supervisor(failures.append)

    async def block() -> None:
        async with supervisor:
            await supervisor.start("counter", counter.run)
            await supervisor.start("between", between.run)
            await supervisor.start("pump", Pump(counter.address).run)
            await anyio.sleep_forever()

    with pytest.raises(ValueError, match="broken"):
        await block()
    assert [type(failure) for failure in failures] == [ValueError]


async def test_a_failure_while_stopping_is_raised() -> None:
    """A model that could not be given back must not go unnoticed, and the others stop all the same."""
    log, children = three()
    children[1].stop_error = ValueError("on stop")
    supervisor = Supervisor()

    async def block() -> None:
        async with supervisor:
            await start_all(supervisor, children)
            log.clear()
            await supervisor.stop()

    with pytest.raises(ValueError, match="on stop"):
        await block()
    assert log == STOPPED


async def test_a_failing_start_stops_those_before_it_and_comes_out_as_it_is() -> None:
    """An engine that can't start leaves nothing running, and says why."""
    log, children = three()
    children[2].start_error = ValueError("no memory")
    failures: list[Exception] = []
    supervisor = Supervisor(failures.append)

    async def block() -> None:
        async with supervisor:
            await start_all(supervisor, children)

    with pytest.raises(ValueError, match="no memory") as caught:
        await block()
    assert log == ["a ready", "b ready", "c ended", "b ended", "a ended"]
    assert failures == [caught.value]


async def test_the_blocks_own_error_comes_out_as_it_is() -> None:
    """No group round what the block raised."""
    log, children = three()
    error = LookupError("mine")
    supervisor = Supervisor()

    async def block() -> None:
        async with supervisor:
            await start_all(supervisor, children)
            log.clear()
            raise error

    with pytest.raises(LookupError) as caught:
        await block()
    assert caught.value is error
    assert supervisor.failure is None
    assert log == STOPPED


async def test_an_interrupt_comes_out_as_it_is() -> None:
    """Ctrl-C inside the block is Ctrl-C outside of it."""
    log, children = three()
    supervisor = Supervisor()

    async def block() -> None:
        async with supervisor:
            await start_all(supervisor, children)
            log.clear()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await block()
    assert log == STOPPED


async def test_an_actor_gone_outside_is_no_matter_of_the_supervisor() -> None:
    """A block may handle what it asked for."""
    counter = Counter()
    supervisor = Supervisor()
    async with supervisor:
        await supervisor.start("counter", counter.run)
        await supervisor.stop()
        with pytest.raises(ActorGone):
            await counter.address.ask(Count())
