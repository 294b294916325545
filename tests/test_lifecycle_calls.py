"""The public table of the lifecycle, row by row, on both facades and each way of living."""

from typing import Any

import anyio
import pytest

from megallm.core_async.actors.lifecycle import KvMode
from megallm.core_async.errors import EngineDeadError, EngineStoppedError, LifecycleError
from megallm.sync.llm import MegatronLLM
from tests.fake_llm import ANSWER_S, Driver, Facade, driving, lifecycle_config
from tests.fakes import continuation

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("facade", ["sync", "native", "hosted"]),
]
EVERY_KV_MODE = pytest.mark.parametrize("kv_mode", ["persist", "offload", "recompute"])

CALLS = ["pause", "unpause", "suspend", "resume"]
ENDS = {
    "running": ["paused", "running", "suspended", "running"],
    "paused": ["paused", "running", "suspended", "paused"],
    "suspended": ["suspended", "LifecycleError", "suspended", "paused"],
}
"""Where each of the calls leads."""
PROMPTS = [[7], [1, 2, 3], list(range(30, 50))]
LONG = 60


async def expect_usable(driver: Driver) -> None:
    """Fails unless the engine answers rightly once it runs, and gives all its blocks back."""
    await driver.enter("running")
    (result,) = await driver.generate([[5, 6]], 4)
    assert result.generated_tokens == continuation([5, 6], 4)
    stats = driver.llm.engine.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)


def expect_undisturbed(results: list[Any]) -> None:  # Any: results
    """Fails unless each prompt got its own continuation, to the end."""
    assert [result.generated_tokens for result in results] == [
        continuation(prompt, LONG) for prompt in PROMPTS
    ]
    assert {result.finish_reason for result in results} == {"length"}


# ---- alive ---------------------------------------------------------------------------------------


@EVERY_KV_MODE
@pytest.mark.parametrize("phase", ENDS)
async def test_each_call_from_each_phase_ends_where_the_table_says(
    facade: Facade, kv_mode: KvMode, phase: str
) -> None:
    """Made twice, since scripts do: the second is a row of the same table."""
    async with driving(facade, lifecycle_config(kv_mode)) as driver:
        for index, call in enumerate(CALLS):
            await driver.enter(phase)
            for _ in range(2):
                before, end = driver.phase, ENDS[driver.phase][index]
                if end == "LifecycleError":
                    with pytest.raises(LifecycleError):
                        await driver.call(call)
                    end = before
                else:
                    await driver.call(call)
                assert driver.phase == end, f"{call}() from {before}"
        await expect_usable(driver)


@pytest.mark.parametrize("phase", ENDS)
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_every_mode_of_a_pause_is_legal_in_every_phase(facade: Facade, mode: str, phase: str) -> None:
    """A script does not know what another thread has done meanwhile."""
    async with driving(facade) as driver:
        await driver.enter(phase)
        await driver.call("pause", mode)
        assert driver.phase == ("paused" if phase == "running" else phase)
        await expect_usable(driver)


async def test_unpausing_a_suspended_engine_says_what_to_do(facade: Facade) -> None:
    """Upstream ignores it, and the caller hangs."""
    async with driving(facade) as driver:
        await driver.enter("suspended")
        with pytest.raises(LifecycleError) as refused:
            await driver.call("unpause")
        assert str(refused.value) == (
            "unpause() can't run while the engine is suspended; call resume() first "
            "(legal: pause(), suspend(), resume(), shutdown())"
        )


async def test_arguments_are_checked_at_the_call(facade: Facade) -> None:
    """Nothing changes then, whatever the phase."""
    async with driving(facade) as driver:
        await driver.generate([[1]], 1)
        with pytest.raises(ValueError, match=r"mode is 'drain'; it must be \"keep\", \"wait\" or \"abort\""):
            await driver.call("pause", "drain")
        for epoch in (-1, True, 1.5, None):
            with pytest.raises(ValueError, match=rf"epoch is {epoch!r}; it must be an integer of at least 0"):
                await driver.call("set_generation_epoch", epoch)
        assert driver.phase == "running"


async def test_many_calls_at_once_are_all_answered(facade: Facade) -> None:
    """Every worker of a framework may call, and nobody takes turns."""
    async with driving(facade, lifecycle_config("offload")) as driver:
        pending = [driver.start(driver.call(call)) for call in CALLS * 6]
        for each in pending:
            try:
                await each.outcome()
            except LifecycleError as error:
                assert "unpause() can't run" in str(error)  # noqa: PT017 - whether it is raised is a matter of order
        await driver.call("resume")
        await expect_usable(driver)


# ---- the modes of a pause ------------------------------------------------------------------------


async def test_a_keeping_pause_freezes_after_the_step_in_flight(facade: Facade) -> None:
    """It drains nothing: no step is made until unpause, and then each request goes on where it was."""
    async with driving(facade) as driver:
        driver.runner.hold("step 5")
        generate = driver.start(driver.generate(PROMPTS, LONG))
        await driver.until_held()
        pause = driver.start(driver.call("pause"))
        await driver.until("pausing")
        driver.runner.go()
        await pause.outcome()
        steps = len(driver.runner.plans)
        assert steps <= 6, "the step that was in flight, and one that was planned behind it"
        await anyio.wait_all_tasks_blocked()
        assert driver.llm.engine.stats().step == steps == len(driver.runner.plans)
        assert not generate.has_ended
        await driver.call("unpause")
        expect_undisturbed(await generate.outcome())


async def test_a_waiting_pause_lets_what_is_there_finish_and_holds_what_comes(facade: Facade) -> None:
    """What an evaluation between two training steps wants."""
    async with driving(facade) as driver:
        driver.runner.hold("step 5")
        generate = driver.start(driver.generate(PROMPTS, LONG))
        await driver.until_held()
        pause = driver.start(driver.call("pause", "wait"))
        await driver.until("pausing")
        late = driver.start(driver.generate([[9]], 3))
        await anyio.wait_all_tasks_blocked()
        driver.runner.go()
        await pause.outcome()
        expect_undisturbed(await generate.outcome())
        assert not late.has_ended
        assert len(driver.runner.plans) == LONG, "no step was for the one that came late"
        await driver.call("unpause")
        (result,) = await late.outcome()
        assert result.generated_tokens == continuation([9], 3)


@pytest.mark.parametrize("phase", ["running", "paused", "suspended"])
async def test_an_aborting_pause_ends_requests_with_what_they_have(facade: Facade, phase: str) -> None:
    """Also those that a pause before has frozen; none is left for the unpause to run."""
    async with driving(facade, lifecycle_config("recompute")) as driver:
        driver.runner.hold("step 5")
        generate = driver.start(driver.generate(PROMPTS, LONG))
        await driver.until_held()
        first = driver.start(driver.call({"paused": "pause", "suspended": "suspend"}.get(phase, "resume")))
        if phase != "running":
            await driver.until("pausing")
            driver.runner.go()
            await first.outcome()
        pause = driver.start(driver.call("pause", "abort"))
        if phase == "running":
            await driver.until("pausing")
        driver.runner.go()
        await pause.outcome()
        results = await generate.outcome()
        assert {result.finish_reason for result in results} == {"abort"}
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert result.generated_tokens == continuation(prompt, len(result.generated_tokens))
            assert 0 < len(result.generated_tokens) < LONG
            assert result.succeeded()
        num_steps = len(driver.runner.plans)
        await driver.enter("running")
        await anyio.wait_all_tasks_blocked()
        assert len(driver.runner.plans) == num_steps
        await expect_usable(driver)


# ---- stopped, dead, direct -----------------------------------------------------------------------


@pytest.mark.parametrize("phase", ENDS)
async def test_a_stopped_engine_refuses_all_but_to_stop(facade: Facade, phase: str) -> None:
    """An error that says so, never a wait."""
    async with driving(facade) as driver:
        await driver.enter(phase)
        with anyio.fail_after(ANSWER_S):
            await driver.call("shutdown")
            await driver.call("shutdown")
            await driver.call("wait_for_shutdown")
            assert driver.phase == "stopped"
            for call, arguments in [*((call, []) for call in CALLS), ("set_generation_epoch", [3])]:
                with pytest.raises(EngineStoppedError, match="the engine was shut down"):
                    await driver.call(call, *arguments)
            with pytest.raises(EngineStoppedError):
                await driver.generate([[1]])
            with pytest.raises(EngineStoppedError):
                await driver.next(driver.llm.stream([1]))
            await driver.call("shutdown")


async def test_a_dead_engine_gives_every_call_the_first_failure(facade: Facade) -> None:
    """And can still be shut down."""
    failure = ArithmeticError("boom")
    async with driving(facade) as driver:
        driver.runner.break_at("step 3", failure)
        with anyio.fail_after(ANSWER_S):
            with pytest.raises(EngineDeadError) as first:
                await driver.generate(PROMPTS)
            assert first.value.__cause__ is failure
            assert driver.phase == "failed"
            for call, arguments in [*((call, []) for call in CALLS), ("set_generation_epoch", [3])]:
                with pytest.raises(
                    EngineDeadError, match="the engine failed: ArithmeticError: boom"
                ) as later:
                    await driver.call(call, *arguments)
                assert later.value.__cause__ is failure
            with pytest.raises(EngineDeadError) as waited:
                await driver.call("wait_for_shutdown")
            assert waited.value.__cause__ is failure
            await driver.call("shutdown")
            with pytest.raises(EngineDeadError):
                await driver.call("wait_for_shutdown")


async def test_direct_mode_has_no_lifecycle_and_says_how_to_get_one(facade: Facade) -> None:
    """As upstream; there is nobody who could keep several ranks together."""
    async with driving(facade, use_coordinator=False) as driver:
        for call in CALLS:
            with pytest.raises(RuntimeError, match=rf"{call}\(\) requires use_coordinator=True"):
                await driver.call(call)
        for name in ("submit", "run_sync"):
            coroutine = driver.call("generate", [])
            with pytest.raises(RuntimeError, match=rf"{name}\(\) requires use_coordinator=True"):
                getattr(driver.llm, name)(coroutine)
            coroutine.close()
        with pytest.raises(RuntimeError, match="requires use_coordinator=True"):
            await enter_update(driver)
        with anyio.fail_after(ANSWER_S):
            await driver.call("wait_for_shutdown")
        await expect_usable_in_direct_mode(driver)
        await driver.call("shutdown")
        await driver.call("wait_for_shutdown")


async def expect_usable_in_direct_mode(driver: Driver) -> None:
    """Fails unless it answers, and stamps results as in the other mode."""
    await driver.call("set_generation_epoch", 4)
    (result,) = await driver.generate([[5, 6]], 4)
    assert result.generated_tokens == continuation([5, 6], 4)
    assert result.policy_epoch == [(0, 4)]


async def enter_update(driver: Driver) -> None:
    """Begins to change the weights, as a trainer does."""
    update: Any = driver.llm.updating_weights(1)  # Any: a context manager of either kind
    if isinstance(driver.llm, MegatronLLM):
        with update:
            pytest.fail("the block was entered")
    async with update:
        pytest.fail("the block was entered")
