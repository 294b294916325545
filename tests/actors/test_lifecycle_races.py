"""The lifecycle actor under calls from many tasks at once, and a pump that is never where one expects it."""

from collections.abc import Awaitable, Callable

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from megallm.core_async.actors.lifecycle import KvMode
from megallm.core_async.messages import Ask, Pause, Resume, Suspend, Unpause
from megallm.core_async.plan.phases import Call, Phase
from tests.actors.stage import KV_MODES, Stage, staged
from tests.plan.test_phases import one_at_a_time

MESSAGES: dict[Call, Callable[[str], Ask[None]]] = {
    Call.PAUSE: Pause,
    Call.UNPAUSE: lambda _mode: Unpause(),
    Call.SUSPEND: lambda _mode: Suspend(),
    Call.RESUME: lambda _mode: Resume(),
}
CALLS = st.tuples(
    st.sampled_from(list(MESSAGES)), st.sampled_from(["keep", "wait", "abort"]), st.integers(0, 12)
)
"""A call, its mode where it pauses, and how many turns of the loop pass before it."""


async def pump(stage: Stage, num_turns: Callable[[], Awaitable[object]]) -> None:
    """Goes by as the engine's pump does; while it may plan, a step is in flight for some turns."""
    while True:
        await stage.gate.wait()
        order = -1
        while order != stage.gate.order or stage.gate.is_open:
            order = stage.gate.order
            stage.gate.rest()
            stage.is_stepping = stage.gate.is_allowed
            await num_turns()
            stage.is_stepping = False
        stage.rest(order)


@settings(max_examples=200)
@given(
    calls=st.lists(CALLS, max_size=12),
    kv_mode=st.sampled_from(KV_MODES),
    step_turns=st.integers(0, 6),
    backend=st.sampled_from(["asyncio", "trio"]),
)
def test_calls_of_many_tasks_get_what_they_get_one_at_a_time(
    calls: list[tuple[Call, str, int]], kv_mode: KvMode, step_turns: int, backend: str
) -> None:
    """Whatever the moment: the answers are the table's, and nothing is done while a step is in flight."""

    async def step() -> None:
        for _ in range(step_turns):
            await anyio.lowlevel.checkpoint()

    async def play() -> None:
        async with staged(kv_mode) as stage, anyio.create_task_group() as tasks:
            tasks.start_soon(pump, stage, step)
            with anyio.fail_after(10):
                async with anyio.create_task_group() as callers:
                    for index, (call, mode, turns) in enumerate(calls):
                        for _ in range(turns):
                            await anyio.lowlevel.checkpoint()
                        callers.start_soon(stage.ask, MESSAGES[call](mode), f"{index:02}")
                        await anyio.lowlevel.checkpoint()
            answers = sorted(entry for entry in stage.log if ":" in entry)
            expected, phase = one_at_a_time([call for call, _, _ in calls])
            assert answers == [f"{index:02}: {answer}" for index, answer in enumerate(expected)]
            assert stage.lifecycle.phase is phase
            assert stage.gate.is_allowed == (phase is Phase.RUNNING)
            tasks.cancel_scope.cancel()

    anyio.run(play, backend=backend)
