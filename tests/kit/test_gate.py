"""The gate before the pump: it opens when there is work, and no work is overlooked."""

import anyio
import pytest

from megallm.core_async.kit.gate import Gate

pytestmark = pytest.mark.anyio


class Pump:
    """Goes through the gate as the engine's pump does, and counts."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.num_runs = 0
        self.num_turns = 0
        """Turns of the loop that it spends on work after each look; work may come meanwhile."""

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self.gate.wait()
            self.gate.rest()
            self.num_runs += 1
            for _ in range(self.num_turns):
                await anyio.lowlevel.checkpoint()


async def test_a_new_gate_is_shut_and_allows_nothing() -> None:
    """Nothing runs before the engine has started."""
    gate = Gate()
    assert not gate.is_allowed
    assert not gate.is_open


async def test_each_need_lets_the_pump_through_once() -> None:
    """The pump sleeps until there is work, works, and sleeps again."""
    gate = Gate()
    pump = Pump(gate)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        for num_runs in range(3):
            await anyio.wait_all_tasks_blocked()
            assert pump.num_runs == num_runs
            gate.need()
            gate.need()
            assert gate.is_open
        await anyio.wait_all_tasks_blocked()
        assert not gate.is_open
        tasks.cancel_scope.cancel()


async def test_a_need_before_the_pump_waits_is_kept() -> None:
    """A submission may come while the engine is starting."""
    gate = Gate()
    gate.need()
    pump = Pump(gate)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        await anyio.wait_all_tasks_blocked()
        assert pump.num_runs == 1
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("turn", range(6))
async def test_work_that_comes_while_the_pump_looks_is_not_lost(turn: int) -> None:
    """The pump rests before it looks, so that whatever comes later opens the gate again."""
    gate = Gate()
    pump = Pump(gate)
    pump.num_turns = 3
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        gate.need()
        for _ in range(turn):
            await anyio.lowlevel.checkpoint()
        num_runs = pump.num_runs
        gate.need()
        await anyio.wait_all_tasks_blocked()
        assert pump.num_runs == max(1, num_runs + 1)
        tasks.cancel_scope.cancel()


async def test_a_cancelled_wait_leaves_the_gate_as_it_is() -> None:
    """The next pump finds the work that the cancelled one did not do."""
    gate = Gate()
    gate.need()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await gate.wait()
    assert gate.is_open
    await gate.wait()


async def test_allowing_and_forbidding_call_the_pump() -> None:
    """On a pause it has to finish what is in flight, after it to look at what has queued up."""
    gate = Gate()
    pump = Pump(gate)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run)
        gate.allow()
        assert gate.is_allowed
        await anyio.wait_all_tasks_blocked()
        assert pump.num_runs == 1
        gate.forbid()
        assert not gate.is_allowed
        await anyio.wait_all_tasks_blocked()
        assert pump.num_runs == 2
        tasks.cancel_scope.cancel()


async def test_what_is_allowed_and_forbidden_is_counted_and_what_is_needed_is_not() -> None:
    """The pump reports by which order it came to rest; work that comes meanwhile is no order."""
    gate = Gate()
    gate.allow()
    gate.forbid()
    gate.call()
    assert gate.order == 3
    gate.rest()
    gate.need()
    assert gate.order == 3
    assert gate.is_open
    assert not gate.is_allowed
