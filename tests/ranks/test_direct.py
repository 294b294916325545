"""Direct mode over two ranks: both programs make every call, and both get what comes of it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing

import anyio
import pytest

from megallm.core_async.engine import Engine
from megallm.core_async.errors import EngineBusy, LifecycleError
from megallm.core_async.messages import Completion
from megallm.core_async.ranks.assembly import Role, assembled
from megallm.core_async.ranks.calls import Calls
from megallm.core_async.ranks.direct import call_of
from tests.engines import Rig, engine_config, fake_runner
from tests.fakes import FakeTokenizer, continuation
from tests.loops import EVERY_LOOP
from tests.ranks.in_process import NAMES, Collective, FakeRanks

pytestmark = [pytest.mark.anyio, EVERY_LOOP]


@asynccontextmanager
async def running_ranks(max_waiting: int = 1000) -> AsyncGenerator[list[Rig]]:
    """Runs the engines of two ranks, the leader's first."""
    config, collective = engine_config(max_waiting=max_waiting, max_requests=4), Collective()
    rigs: list[Rig] = []
    calls: list[Calls] = []
    for place in range(len(NAMES)):
        runner = fake_runner(config)
        runner.before_launch = collective.wait
        role = Role(ranks=FakeRanks(place, collective), is_direct=True)
        engine, its_calls = assembled(config, runner, FakeTokenizer(), role)
        rigs.append(Rig(engine, runner))
        calls.append(its_calls)
    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as starts:
            for rig in rigs:
                starts.start_soon(tasks.start, rig.engine.run)
        try:
            yield rigs
        finally:
            with anyio.CancelScope(shield=True):
                await rigs[0].engine.shutdown()
                await calls[1].wait_for_leader()


async def everywhere(rigs: list[Rig], prompts: list[list[int]], num_tokens: int = 8) -> list[list[list[int]]]:
    """Gives what each rank's program got."""
    outputs: dict[int, list[list[int]]] = {}

    async def generate(place: int, rig: Rig) -> None:
        completions = await rig.complete(*(rig.request(prompt, num_tokens) for prompt in prompts))
        outputs[place] = [each.token_ids for each in completions]

    async with anyio.create_task_group() as tasks:
        for place, rig in enumerate(rigs):
            tasks.start_soon(generate, place, rig)
    return [outputs[place] for place in range(len(rigs))]


async def test_every_rank_gets_all_the_output() -> None:
    """As upstream's: a script that runs on every rank sees the same on each."""
    prompts = [[1, 2], [3], [4, 5, 6]]
    async with running_ranks() as rigs:
        expected = [continuation(prompt, 8) for prompt in prompts]
        assert await everywhere(rigs, prompts) == [expected, expected]
        assert await everywhere(rigs, prompts[:1]) == [expected[:1], expected[:1]]


async def test_ranks_that_ask_for_different_things_are_told_so() -> None:
    """Run as they are, one of them would wait for ever for what nobody computes."""
    errors: list[str] = []

    async def generate(rig: Rig, prompt: list[int]) -> None:
        try:
            await rig.complete(rig.request(prompt))
        except LifecycleError as error:
            errors.append(str(error))

    async with running_ranks() as rigs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate, rigs[0], [1])
            tasks.start_soon(generate, rigs[1], [2])
        assert len(errors) == 2
        assert all("makes the same calls" in error for error in errors)
        (first, second) = await everywhere(rigs, [[7]])
        assert first == second == [continuation([7], 8)]


async def test_a_refusal_reaches_every_rank() -> None:
    """And leaves nothing behind on any."""
    refused: list[str] = []

    async def generate(rig: Rig) -> None:
        with pytest.raises(EngineBusy) as caught:
            await rig.complete(*(rig.request([each]) for each in range(9)))
        refused.append(str(caught.value))

    async with running_ranks(max_waiting=3) as rigs:
        async with anyio.create_task_group() as tasks:
            for rig in rigs:
                tasks.start_soon(generate, rig)
        assert len(refused) == 2
        assert len(set(refused)) == 1
        (first, second) = await everywhere(rigs, [[7]])
        assert first == second


async def test_the_leaders_abort_ends_the_request_on_every_rank() -> None:
    """A rank that waited on would wait for ever."""
    ended: list[Completion] = []

    async def wait(rig: Rig) -> None:
        ended.extend(await rig.complete(rig.request([1], 100)))

    async def leave(rig: Rig) -> None:
        request = rig.request([1], 100)
        with closing(await rig.engine.submit([request])):
            pass

    async with running_ranks() as rigs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, rigs[1])
            tasks.start_soon(leave, rigs[0])
        (completion,) = ended
        assert completion.finish_reason == "abort"
        await everywhere(rigs, [[7]])
        assert rigs[0].engine.stats().used_blocks == 0


async def test_a_call_is_named_for_all_that_was_asked() -> None:
    """Other prompts, parameters or ids are another call."""
    rig = Rig(
        Engine(engine_config(), fake_runner(engine_config()), FakeTokenizer()), fake_runner(engine_config())
    )
    one = rig.request([1, 2])
    assert call_of([one]) == call_of([one])
    assert call_of([one]) != call_of([rig.request([1, 2])])
