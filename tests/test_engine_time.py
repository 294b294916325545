"""The engine on virtual time: what it does when, and that it does nothing when there is nothing to do."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable

import anyio
import pytest
import trio
from trio.testing import MockClock

from megallm.core_async.engine import DEPTH
from megallm.core_async.messages import Completion
from tests.engines import running
from tests.fakes import continuation

HOUR_S = 3_600.0


class Turns(trio.abc.Instrument):
    """Counts the steps of all tasks of a trio loop."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Counts one."""
        self.count += 1


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that never waits: when nothing is ready, its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_turns = 0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Gives the virtual time."""
        return self.now_s


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.num_turns += 1
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("the test waits for nothing")
        if not ready and timeout:
            self._loop.now_s += timeout
        return ready


def run_virtually(function: Callable[[VirtualLoop], Awaitable[None]]) -> None:
    """Runs a test on a fresh virtual asyncio loop."""
    loop = VirtualLoop()

    async def main() -> None:
        await function(loop)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


# ---- nothing to do -----------------------------------------------------------------------------


@pytest.mark.trio
async def test_an_idle_engine_on_trio_wakes_no_task(autojump_clock: MockClock) -> None:
    """Polling costs battery, and time of the other engines on the machine."""
    async with running() as rig:
        await rig.tokens_of([1, 2, 3])
        await anyio.wait_all_tasks_blocked()
        turns = Turns()
        trio.lowlevel.add_instrument(turns)
        await anyio.sleep(HOUR_S)
        trio.lowlevel.remove_instrument(turns)
        assert turns.count <= 1, "the test's own task, woken once"


def test_an_idle_engine_on_asyncio_wakes_no_task() -> None:
    """The same there: the loop turns for the test's own timer, and for nothing else."""

    async def idle(loop: VirtualLoop) -> None:
        async with running() as rig:
            await rig.tokens_of([1, 2, 3])
            await anyio.sleep(1)
            before = loop.num_turns
            await anyio.sleep(HOUR_S)
            assert loop.num_turns - before <= 4

    run_virtually(idle)


@pytest.mark.trio
async def test_an_engine_whose_readers_are_slow_still_comes_to_rest(autojump_clock: MockClock) -> None:
    """What nobody has taken yet waits in the outbox, not in the engine."""
    async with running() as rig:
        outbox = await rig.engine.submit([rig.request([5], 20, is_streamed=True)])
        await anyio.sleep(HOUR_S)
        assert rig.engine.stats().used_blocks == 0
        turns = Turns()
        trio.lowlevel.add_instrument(turns)
        await anyio.sleep(HOUR_S)
        assert turns.count <= 1
        trio.lowlevel.remove_instrument(turns)
        outbox.close()


# ---- two plans in flight -----------------------------------------------------------------------


@pytest.mark.trio
async def test_the_next_plan_is_launched_while_one_runs(autojump_clock: MockClock) -> None:
    """Planning and text hide behind the forward pass; a third plan would only know less."""
    async with running(step_s=10.0, runs_at_launch=False) as rig:
        outbox = await rig.engine.submit([rig.request([5], 20)])
        await anyio.sleep(5)
        assert len(rig.runner.plans) == DEPTH == 2
        await anyio.sleep(10)
        assert len(rig.runner.plans) == 3
        outbox.close()


@pytest.mark.trio
@pytest.mark.parametrize("runs_at_launch", [True, False], ids=["as a CPU", "as a GPU"])
async def test_a_step_takes_the_models_time_and_no_more(
    autojump_clock: MockClock,
    runs_at_launch: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    """Twenty tokens of a model that takes a second a step are there after twenty seconds."""
    async with running(step_s=1.0, runs_at_launch=runs_at_launch) as rig:
        began = anyio.current_time()
        (completion,) = await rig.complete(rig.request([5], 20))
        assert anyio.current_time() - began == pytest.approx(20)
        assert completion.first_token_s == pytest.approx(began + 1)
        assert completion.last_token_s == pytest.approx(began + 20)


# ---- leaving -----------------------------------------------------------------------------------


@pytest.mark.trio
@pytest.mark.parametrize("left_at_s", [0.5, 1.5, 7.25])
@pytest.mark.parametrize("runs_at_launch", [True, False], ids=["as a CPU", "as a GPU"])
async def test_blocks_of_a_cancelled_request_are_free_by_the_next_step(
    autojump_clock: MockClock,
    left_at_s: float,
    runs_at_launch: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    """While the neighbours go on as if nothing had happened."""
    async with running(step_s=1.0, runs_at_launch=runs_at_launch) as rig:
        neighbour: list[Completion] = []

        async def stay() -> None:
            neighbour.extend(await rig.complete(rig.request([7], 15)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stay)
            with anyio.move_on_after(left_at_s) as scope:
                await rig.tokens_of([5] * 80, 40)
            assert scope.cancelled_caught
            step = 1 - left_at_s % 1
            await anyio.sleep(step + 0.01)
            stats = rig.engine.stats()
            assert (stats.running, stats.waiting) == (1, 0)
            assert stats.used_blocks <= 4, "the neighbour's 15 tokens at most; the one that left held 20"
        assert neighbour[0].token_ids == continuation([7], 15)


@pytest.mark.trio
async def test_the_last_request_cancelled_brings_the_engine_to_rest(autojump_clock: MockClock) -> None:
    """The pump must not go on with steps for nobody, nor sleep with blocks held."""
    async with running(step_s=1.0) as rig:
        with anyio.move_on_after(3.5):
            await rig.tokens_of([5] * 80, 40)
        await anyio.sleep(HOUR_S)
        assert rig.engine.stats().used_blocks == 0
        assert len(rig.runner.plans) <= 3 + DEPTH
