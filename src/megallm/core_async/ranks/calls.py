"""The lifecycle calls of a facade: of one rank, or of the programs of all ranks together.

With several ranks each call waits until every rank's program has made it, the leader does it, and all return
together: a trainer that changes its own rank's weights between `suspend` and `resume` is not overtaken.
"""

from collections.abc import Awaitable, Callable
from typing import ClassVar

from megallm.core_async.engine import Engine
from megallm.core_async.errors import ActorGone, LifecycleError
from megallm.core_async.ranks.follower import Follower
from megallm.core_async.ranks.replica import Replica
from megallm.core_async.ranks.together import Together
from megallm.core_async.transport.frames import Fault, fault_of
from megallm.core_async.transport.rank_frames import CallEnded


class Calls:
    """The calls of an engine of one rank."""

    follows: ClassVar[bool] = False
    """Whether another rank leads, and ends the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def pause(self, mode: str = "keep") -> None:
        """See Engine."""
        what = "pause()" if mode == "keep" else f"pause({mode!r})"
        await self.together(what, lambda: self._engine.pause(mode))

    async def unpause(self) -> None:
        """See Engine."""
        await self.together("unpause()", self._engine.unpause)

    async def suspend(self) -> None:
        """See Engine."""
        await self.together("suspend()", self._engine.suspend)

    async def resume(self) -> None:
        """See Engine."""
        await self.together("resume()", self._engine.resume)

    async def set_generation_epoch(self, epoch: object) -> None:
        """See Engine."""
        what = f"set_generation_epoch({epoch!r})"
        await self.together(what, lambda: self._engine.set_generation_epoch(epoch))

    async def wait_for_leader(self) -> None:
        """Waits, on a rank that follows, until the leader has shut down."""

    async def together(self, name: str, call: Callable[[], Awaitable[None]]) -> None:
        """Makes a call, once every rank's program has. `name`: of the call, which all make alike."""
        del name
        await call()


class LeaderCalls(Calls):
    """The same where other ranks follow: they return with this one, with what it raised."""

    def __init__(self, engine: Engine, others: list[Together]) -> None:
        """`others`: whom this rank leads, all of them once the engine has started."""
        super().__init__(engine)
        self.others = others

    async def together(self, name: str, call: Callable[[], Awaitable[None]]) -> None:
        """See Calls."""
        self._engine.check_alive()
        numbers = [other.calls.next_number() for other in self.others]
        fault: Fault | None = None
        try:
            for other, number in zip(self.others, numbers, strict=True):
                await other.calls.gathered(number, name)
            await call()
        except ActorGone as gone:
            error = self._engine.error()
            fault = fault_of(error)
            raise error from error.__cause__ or gone
        except Exception as error:
            fault = fault_of(error)
            raise
        except BaseException:  # a cancel: the other ranks wait for the call's end
            fault = fault_of(LifecycleError(f"the leader's {name} was cancelled"))
            raise
        finally:
            for other, number in zip(self.others, numbers, strict=True):
                other.calls.give_up(number)
                other.to_all(CallEnded(number, fault))


class ReplicaCalls(LeaderCalls):
    """The calls of a rank that leads a replica, and follows the coordinator."""

    follows: ClassVar[bool] = True

    def __init__(self, engine: Replica, others: list[Together]) -> None:
        super().__init__(engine, others)
        self._replica = engine

    async def wait_for_leader(self) -> None:
        """See Calls."""
        await self._replica.wait_for_leader()

    async def together(self, name: str, call: Callable[[], Awaitable[None]]) -> None:
        """See Calls."""
        del call  # the coordinator makes it, once all replicas' programs have
        has_begun = False

        async def follow() -> None:
            nonlocal has_begun
            has_begun = True
            await self._replica.call_made(name)

        try:
            await super().together(name, follow)
        except BaseException as error:  # a cancel too
            if not has_begun:  # the other replicas wait for this one's call, and hear why it does not come
                why = str(error) if isinstance(error, Exception) else "it was cancelled"
                self._replica.call_failed(f"{name} in vain ({why})")
            raise


class FollowerCalls(Calls):
    """The calls of a rank that follows."""

    follows: ClassVar[bool] = True

    def __init__(self, engine: Follower) -> None:
        super().__init__(engine)
        self._follower = engine

    async def wait_for_leader(self) -> None:
        """See Calls."""
        await self._follower.wait_for_leader()

    async def together(self, name: str, call: Callable[[], Awaitable[None]]) -> None:
        """See Calls."""
        del call
        await self._follower.call_made(name)
