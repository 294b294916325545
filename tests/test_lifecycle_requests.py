"""Requests across the lifecycle: frozen, queued, streamed, ended; nobody is left waiting."""

from typing import Any

import anyio
import pytest

from megallm.core_async.actors.lifecycle import KvMode
from megallm.core_async.errors import EngineDeadError, EngineStoppedError
from megallm.core_async.messages import Delta
from tests.fake_llm import ANSWER_S, Driver, Facade, Pending, driving, eventually, greedy, lifecycle_config
from tests.fakes import continuation

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("facade", ["sync", "native", "hosted"]),
]
EVERY_KV_MODE = pytest.mark.parametrize("kv_mode", ["persist", "offload", "recompute"])

PROMPTS = [[7], [1, 2, 3], list(range(30, 50))]
STREAMED = [11, 12, 13, 14, 15]
LONG = 60


async def freeze(driver: Driver, how: str = "pause") -> None:
    """Makes a call that ends the running once a few steps are made, and waits until it is answered."""
    await driver.until_held()
    call = driver.start(driver.call(how))
    await driver.until("pausing")
    driver.runner.go()
    await call.outcome()


def tokens_of(deltas: list[Delta]) -> list[int]:
    """Gives the tokens of deltas in a row."""
    return [token for delta in deltas for token in delta.token_ids]


async def read_all(driver: Driver, stream: Any, deltas: list[Delta]) -> None:  # Any: either facade's stream
    """Reads a stream to its end."""
    while (delta := await driver.next(stream)) is not None:
        deltas.append(delta)


# ---- frozen and going on -------------------------------------------------------------------------


@EVERY_KV_MODE
async def test_suspend_and_resume_change_no_output(facade: Facade, kv_mode: KvMode) -> None:
    """Batches and streams stop, and go on where they were, as if nothing had happened in between."""
    async with driving(facade, lifecycle_config(kv_mode, num_blocks=100)) as driver:
        await driver.call("pause")
        deltas: list[Delta] = []
        reader = driver.start(read_all(driver, driver.llm.stream(STREAMED, greedy(LONG)), deltas))
        generate = driver.start(driver.generate(PROMPTS, LONG))
        await eventually(lambda: driver.llm.engine.stats().waiting == len(PROMPTS) + 1)
        driver.runner.hold("step 9")
        await driver.call("unpause")
        await freeze(driver, "suspend")
        assert driver.phase == "suspended"
        num_steps = len(driver.runner.plans)
        assert 9 <= num_steps < LONG
        await driver.call("resume")
        assert driver.phase == "paused"
        await eventually(lambda: deltas)
        assert len(driver.runner.plans) == num_steps >= len(tokens_of(deltas))
        await driver.call("unpause")
        await reader.outcome()
        assert tokens_of(deltas) == continuation(STREAMED, LONG)
        results = await generate.outcome()
        assert [result.generated_tokens for result in results] == [
            continuation(prompt, LONG) for prompt in PROMPTS
        ]
        assert {result.num_evictions for result in results} == {int(kv_mode == "recompute")}


@EVERY_KV_MODE
async def test_many_round_trips_change_no_output(facade: Facade, kv_mode: KvMode) -> None:
    """An RL loop makes one every few seconds, and long answers live through many."""
    config = lifecycle_config(kv_mode, num_blocks=40, max_tokens=16, max_requests=5, chunks_prompts=True)
    async with driving(facade, config) as driver:
        driver.runner.hold("step 3")
        generate = driver.start(driver.generate(PROMPTS, LONG))
        for trip in range(8):
            await freeze(driver, "suspend" if trip % 2 else "pause")
            await driver.call("resume")
            driver.runner.hold(f"step {len(driver.runner.plans) + 3 + trip}")
            await driver.call("unpause")
        driver.runner.go()
        results = await generate.outcome()
        assert [result.generated_tokens for result in results] == [
            continuation(prompt, LONG) for prompt in PROMPTS
        ]


@pytest.mark.parametrize("phase", ["paused", "suspended"])
async def test_requests_that_come_meanwhile_queue_up_and_run_afterwards(facade: Facade, phase: str) -> None:
    """Callers need not know that an engine is paused: they wait a little longer."""
    async with driving(facade, lifecycle_config("recompute")) as driver:
        await driver.generate([[1]], 1)
        await driver.enter(phase)
        num_steps = len(driver.runner.plans)
        deltas: list[Delta] = []
        generate = driver.start(driver.generate(PROMPTS, 8))
        reader = driver.start(read_all(driver, driver.llm.stream(STREAMED, greedy(8)), deltas))
        await eventually(lambda: driver.llm.engine.stats().waiting == len(PROMPTS) + 1)
        assert (len(driver.runner.plans), generate.has_ended, deltas) == (num_steps, False, [])
        await driver.enter("running")
        await reader.outcome()
        assert tokens_of(deltas) == continuation(STREAMED, 8)
        assert [result.generated_tokens for result in await generate.outcome()] == [
            continuation(prompt, 8) for prompt in PROMPTS
        ]


@pytest.mark.parametrize("how", ["pause", "suspend"])
@EVERY_KV_MODE
async def test_leaving_a_stream_meanwhile_frees_its_blocks(facade: Facade, kv_mode: KvMode, how: str) -> None:
    """No step is made that could take note of it, and the blocks must not wait for one."""
    async with driving(facade, lifecycle_config(kv_mode)) as driver:
        driver.runner.hold("step 9")
        stream = driver.llm.stream(STREAMED, greedy(LONG))
        await driver.next(stream)
        await freeze(driver, how)
        num_steps = len(driver.runner.plans)
        await driver.leave(stream)
        await eventually(lambda: driver.llm.engine.stats().free_blocks == driver.llm.engine.config.num_blocks)
        assert len(driver.runner.plans) == num_steps
        await driver.enter("running")
        assert tokens_of([delta async for delta in driver.stream(STREAMED)]) == continuation(STREAMED, 8)


# ---- the end, from everywhere --------------------------------------------------------------------

PHASES = ["running", "pausing", "waiting", "paused", "suspending", "suspended", "resuming"]
"""Each phase in which the engine can be found; `waiting` is a pause for the requests to end."""


class Scene:
    """An engine in some phase, and calls of every kind that wait."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.pending: dict[str, Pending] = {}

    def start(self, name: str, call: Any) -> None:  # Any: a coroutine
        """Makes a call in a task."""
        self.pending[name] = self._driver.start(call)

    async def errors(self) -> dict[str, Exception | None]:
        """Waits for all calls; gives the error of each."""
        return {name: await pending.error() for name, pending in self.pending.items()}

    async def build(self, phase: str) -> None:
        """Brings the engine there, with the runner held where it works."""
        driver = self._driver
        driver.runner.hold("step 5")
        self.start("generate", driver.generate(PROMPTS, LONG))
        await driver.until_held()
        if phase in ("pausing", "waiting"):
            self.start("pause", driver.call("pause", "wait" if phase == "waiting" else "keep"))
            await driver.until("pausing")
        elif phase != "running":
            await freeze(driver, "pause" if phase in ("paused", "suspending") else "suspend")
        if phase == "suspending":
            await self._hold("release", "suspend")
        elif phase == "resuming":
            await self._hold("restore", "resume")
        self.start("late generate", driver.generate([[3]], 3))
        self.start("stream", driver.next(driver.llm.stream(STREAMED)))
        self.start("wait_for_shutdown", driver.call("wait_for_shutdown"))
        if phase in ("pausing", "waiting", "suspending", "resuming"):
            self.start("postponed unpause", driver.call("unpause"))
            self.start("postponed suspend", driver.call("suspend"))
        await anyio.wait_all_tasks_blocked()

    async def _hold(self, what: str, call: str) -> None:
        self._driver.runner.hold(what)
        self.start(call, self._driver.call(call))
        await self._driver.until_held()


@pytest.mark.parametrize("phase", PHASES)
async def test_a_shutdown_from_every_phase_ends_every_call(facade: Facade, phase: str) -> None:
    """At once, though the device is busy: it waits for nobody, and nobody waits because of it."""
    async with driving(facade, lifecycle_config("offload")) as driver:
        scene = Scene(driver)
        await scene.build(phase)
        shutdown = driver.start(driver.call("shutdown"))
        await driver.until("stopping" if driver.runner.is_held.is_set() else "stopped")
        waiting = scene.pending.pop("wait_for_shutdown")
        errors = await scene.errors()
        assert {name: type(error) for name, error in errors.items()} == dict.fromkeys(
            errors, EngineStoppedError
        )
        assert {str(error) for error in errors.values()} == {"the engine was shut down"}
        driver.runner.go()
        await shutdown.outcome()
        await waiting.outcome()
        assert driver.phase == "stopped"
        assert driver.runner.is_closed


BREAKS = {
    "running": "step 5",
    "pausing": "step 5",
    "waiting": "step 5",
    "suspending": "release",
    "resuming": "restore",
}
"""Where the device can fail in each phase in which it works."""


@pytest.mark.parametrize("phase", BREAKS)
async def test_a_failure_in_every_phase_ends_every_call_with_the_cause(facade: Facade, phase: str) -> None:
    """A device out of memory while it resumes is as dead as one that fails in a step."""
    failure = MemoryError("no room")
    async with driving(facade, lifecycle_config("offload")) as driver:
        scene = Scene(driver)
        await scene.build(phase)
        driver.runner.break_at(BREAKS[phase], failure)
        driver.runner.go()
        errors = await scene.errors()
        assert {name: type(error) for name, error in errors.items()} == dict.fromkeys(errors, EngineDeadError)
        assert {str(error) for error in errors.values()} == {"the engine failed: MemoryError: no room"}
        assert {name: error.__cause__ for name, error in errors.items() if error} == dict.fromkeys(
            errors, failure
        )
        for call in ("pause", "unpause", "suspend", "resume"):
            with pytest.raises(EngineDeadError) as later:
                await driver.call(call)
            assert later.value.__cause__ is failure
        with anyio.fail_after(ANSWER_S):
            await driver.call("shutdown")


async def test_a_cache_that_can_not_be_released_or_restored_is_a_failure_by_itself(facade: Facade) -> None:
    """With no request anywhere: the call that asked for it says what failed."""
    cases: list[tuple[KvMode, str]] = [
        ("recompute", "suspend"),
        ("offload", "suspend"),
        ("offload", "resume"),
    ]
    for kv_mode, call in cases:
        failure = MemoryError(f"{kv_mode} {call}")
        async with driving(facade, lifecycle_config(kv_mode)) as driver:
            if call == "resume":
                await driver.call("suspend")
            driver.runner.break_at("release" if call == "suspend" else "restore", failure)
            with pytest.raises(EngineDeadError) as dead:
                await driver.call(call)
            assert dead.value.__cause__ is failure
            assert driver.phase == "failed"


async def test_another_thread_may_wait_for_the_shutdown(facade: Facade) -> None:
    """A serving script's main thread does, while a signal's handler shuts down."""
    async with driving(facade) as driver:
        await driver.generate([[1]], 1)
        waiting = [driver.start(driver.call("wait_for_shutdown")) for _ in range(3)]
        for phase in ("paused", "suspended", "running"):
            await driver.enter(phase)
        await anyio.wait_all_tasks_blocked()
        assert not any(each.has_ended for each in waiting)
        await driver.call("shutdown")
        for each in waiting:
            await each.outcome()
