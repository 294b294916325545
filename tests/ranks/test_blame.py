"""A rank's worker names its rank when it fails, and lets a better explanation come first."""

import anyio
import pytest

from megallm.core_async.errors import RankLostError
from megallm.core_async.kit.supervisor import Supervisor
from megallm.core_async.messages import FollowStep
from megallm.core_async.ranks.blame import RankWorker
from tests.actors.test_worker import step
from tests.fakes import FakeRunner
from tests.loops import EVERY_LOOP

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


async def test_a_failure_is_told_at_once_and_names_the_rank() -> None:
    """Whoever reads the last line of a log learns where to look."""
    runner, told = FakeRunner(), list[str]()

    def fail(_plan: object) -> None:
        raise ArithmeticError("not a number")

    runner.before_launch = fail
    worker = RankWorker(runner, 3, lambda failure: told.append(str(failure)))
    worker.is_explained.set()

    async def work() -> None:
        async with Supervisor() as supervisor:
            await supervisor.start("worker", worker.run)
            worker.address.send(FollowStep(step(1, [3])))
            await anyio.sleep_forever()

    with pytest.raises(RankLostError, match="rank 3 failed: ArithmeticError: not a number") as caught:
        await work()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert told == ["rank 3 failed: ArithmeticError: not a number"]
