"""The lifecycle under many callers at once: its mailbox is bounded, and no user may overrun it."""

import pytest

from megallm.core_async.errors import EngineBusy
from tests.fake_llm import driving, eventually, lifecycle_config
from tests.fakes import continuation

pytestmark = pytest.mark.anyio

MANY = 1_100
"""More than the lifecycle's mailbox holds."""


async def test_requests_in_any_number_may_come_while_the_cache_is_released() -> None:
    """A large one takes seconds, in which the lifecycle reads nothing and the pump has nothing to do."""
    config = lifecycle_config("offload", max_waiting=2 * MANY)
    async with driving("native", config) as driver:
        await driver.generate([[1]], 1)
        driver.runner.hold("release")
        suspend = driver.start(driver.call("suspend"))
        await driver.until_held()
        generates = [driver.start(driver.generate([[0]], 2))]
        for number in range(1, MANY):
            await eventually(lambda number=number: driver.llm.engine.stats().waiting == number)
            generates.append(driver.start(driver.generate([[number % 96]], 2)))
        driver.runner.go()
        await suspend.outcome()
        await driver.enter("running")
        for number, generate in enumerate(generates):
            (result,) = await generate.outcome()
            assert result.generated_tokens == continuation([number % 96], 2)


@pytest.mark.parametrize("call", ["pause", "set_generation_epoch"])
async def test_too_many_calls_at_once_are_refused_and_do_no_harm(call: str) -> None:
    """Each caller learns whether its call was taken; the engine goes on."""
    arguments = [1] if call == "set_generation_epoch" else []
    async with driving("native") as driver:
        await driver.generate([[1]], 1)
        calls = [driver.start(driver.call(call, *arguments)) for _ in range(4 * MANY)]
        errors = [await each.error() for each in calls]
        refused = [error for error in errors if error is not None]
        assert 0 < len(refused) < len(calls)
        assert {type(error) for error in refused} == {EngineBusy}
        assert {str(error) for error in refused} == {"too many calls at once; try again later"}
        await driver.enter("running")
        (result,) = await driver.generate([[5, 6]], 4)
        assert result.generated_tokens == continuation([5, 6], 4)
