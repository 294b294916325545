"""The engine's end of a front end: every row to its owner, and no front end can harm the others."""

import logging
import socket
import threading

import anyio
import pytest

from megallm.core_async.actors.detokenizer import Parcel
from megallm.core_async.errors import (
    EngineBusy,
    EngineDeadError,
    EngineStoppedError,
    LifecycleError,
    NoProfilerError,
)
from megallm.core_async.kit.outbox import Outbox
from megallm.core_async.messages import Sampling, StepPlan
from megallm.core_async.plan.phases import Phase
from megallm.core_async.transport.byte_stream import ByteStream
from megallm.core_async.transport.frames import CloseRequests, SubmitRequests
from megallm.core_async.transport.framing import FrameWriter
from megallm.http.processes.hub import Peer
from tests.device.profilers import FakeProfiler
from tests.engines import engine_config, running
from tests.fakes import continuation
from tests.http.linked import fill, linked, owned
from tests.http.loopback import eventually
from tests.ranks.in_process_replicas import running_fleet

pytestmark = pytest.mark.anyio

LONG = engine_config(num_blocks=512, max_sequence_length=1024)


async def read_on(outbox: Outbox[Parcel]) -> None:
    """Takes what comes until that raises."""
    while True:
        await outbox.take()


async def test_each_front_end_gets_its_own_tokens_and_the_engine_its_own() -> None:
    """All of them run in one batch; a row that goes astray is another user's text."""
    async with running() as rig, linked(rig, 3) as front_ends:
        got: dict[int, list[int]] = {}

        async def ask(index: int) -> None:
            prompt = [index, 2, 3]
            got[index] = (
                await front_ends[index % 3].tokens_of(prompt, 20)
                if index < 9
                else await rig.tokens_of(prompt, 20)
            )

        async with anyio.create_task_group() as tasks:
            for index in range(12):
                tasks.start_soon(ask, index)
        assert got == {index: continuation([index, 2, 3], 20) for index in range(12)}


async def test_a_front_end_need_not_know_that_the_model_has_replicas() -> None:
    """Its requests run on all of them, its leaving frees their blocks, and its pause rests them all."""
    async with running_fleet() as fleet, linked(fleet.rig, 2) as (first, second):
        got: dict[int, list[int]] = {}

        async def ask(index: int) -> None:
            got[index] = await (first, second)[index % 2].tokens_of([index, 2], 12)

        async with anyio.create_task_group() as tasks:
            for index in range(8):
                tasks.start_soon(ask, index)
        assert got == {index: continuation([index, 2], 12) for index in range(8)}
        assert min(fleet.num_steps()) > 0
        for index in range(4):
            (await first.remote.submit([first.request([index], 100)])).close()
        await second.remote.pause()
        assert {engine.phase for engine in (fleet.coordinator, *fleet.others)} == {Phase.PAUSED}
        await second.remote.unpause()
        await eventually(lambda: fleet.coordinator.stats().used_blocks == 0)
        assert first.remote.config.max_waiting == fleet.rig.engine.config.max_waiting == 1000


async def test_the_requests_of_a_front_end_that_dies_are_aborted_and_others_go_on() -> None:
    """It is killed at any moment; `running` fails unless every block is free afterwards."""
    async with running(LONG) as rig, linked(rig, 2) as (dying, other):
        await dying.remote.submit([dying.request([1, 2], 1000), dying.request([3], 1000)])
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    assert await other.tokens_of([5], 200) == continuation([5], 200)

                tasks.start_soon(ask)
                await eventually(lambda: rig.engine.stats().running == 3)
                dying.stream.abort()
                await dying.peer_ended.wait()
        await eventually(lambda: rig.engine.stats().running == 0)
        with pytest.raises(EngineDeadError, match="process has gone"):
            await dying.tokens_of([1])


async def test_a_front_end_that_does_not_read_is_dropped_and_stalls_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stopped process takes nothing: what it does not read may not fill the memory, nor hold the step."""
    async with running(LONG) as rig, linked(rig, 1, max_behind=10_000) as (healthy,):
        ours, theirs = map(ByteStream, socket.socketpair())
        stuck = Peer(rig.engine, ours, b"x" * 9_000, lambda _: None, max_behind=10_000)
        out = FrameWriter()
        request = healthy.request([7], 1000)
        out.add(SubmitRequests(1, [owned(request, stuck.owner)]))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stuck.run)
            await theirs.send(out.take())
            await eventually(lambda: rig.engine.stats().running == 1)
            fill(ours)
            with caplog.at_level(logging.ERROR):
                await eventually(lambda: rig.engine.stats().running == 0)
        theirs.close()
        assert "bytes behind, the limit is 10000; dropping it" in caplog.text
        assert await healthy.tokens_of([7], 100) == continuation([7], 100)


@pytest.mark.parametrize("fault", ["nonsense", "another's request"])
async def test_a_front_end_that_breaks_the_protocol_is_dropped(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is of another version, or broken; what it would say next can't be believed."""
    async with running() as rig, linked(rig, 2) as (broken, other):
        if fault == "nonsense":
            chunk = b"\x01\x00\x00\x00\xc1"
        else:
            out = FrameWriter()
            out.add(SubmitRequests(1, [other.request([1])]))
            chunk = bytes(out.take())
        with caplog.at_level(logging.ERROR):
            await broken.stream.send(chunk)
            await broken.peer_ended.wait()
        assert "makes no sense" in caplog.text
        assert await other.tokens_of([1]) == continuation([1], 8)


async def test_a_full_waiting_list_is_told_to_the_one_who_asked() -> None:
    """It is a 429, and the next request is none."""
    async with running(engine_config(max_waiting=2)) as rig, linked(rig) as (front_end,):
        with pytest.raises(EngineBusy, match="3 requests came and 2 more may wait"):
            await front_end.remote.submit([front_end.request([n]) for n in range(3)])
        assert await front_end.tokens_of([1]) == continuation([1], 8)


async def test_the_lifecycle_is_called_from_a_front_end() -> None:
    """An RL loop may drive the engine over HTTP; phases and refusals are the engine's own."""
    async with running() as rig, linked(rig, 2) as (caller, other):
        await caller.remote.pause()
        assert (rig.engine.phase, caller.remote.phase) == ("paused", "paused")
        await eventually(lambda: other.remote.phase == "paused")
        await caller.remote.suspend()
        with pytest.raises(LifecycleError, match="resume"):
            await caller.remote.unpause()
        await caller.remote.resume()
        await caller.remote.unpause()
        assert caller.remote.phase == "running"
        with pytest.raises(ValueError, match="mode is 'nap'"):
            await caller.remote.pause("nap")
        await eventually(lambda: other.remote.phase == "running")


async def test_the_profiler_is_the_engines_process_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front end runs no kernel; where there is nothing to record, the engine goes on."""
    async with running() as rig, linked(rig) as (front_end,):
        profiler = FakeProfiler.installed(monkeypatch)
        await front_end.remote.profile("start")
        await front_end.remote.profile("stop")
        assert profiler.told == ["start", "stop"]
        FakeProfiler.installed(monkeypatch, refusal="not permitted")
        with pytest.raises(NoProfilerError, match="not permitted"):
            await front_end.remote.profile("start")
        with pytest.raises(ValueError, match="action is 'pause'"):
            await front_end.remote.profile("pause")
        assert await front_end.tokens_of([1]) == continuation([1], 8)


async def test_figures_and_phase_reach_front_ends_that_have_no_request() -> None:
    """Any of them may be asked for /metrics or /health."""
    async with running(LONG) as rig, linked(rig, 2) as (idle, busy):
        outbox = await busy.remote.submit([busy.request([1], 1000)])
        await eventually(lambda: idle.remote.stats().running == 1)
        outbox.close()
        await eventually(lambda: idle.remote.stats().running == 0)
        await rig.engine.pause()
        await eventually(lambda: idle.remote.phase == "paused")
        await rig.engine.unpause()


async def test_the_engines_failure_reaches_streams_calls_and_whoever_asks_later() -> None:
    """/health says 503 then, and every stream ends with an error; nobody waits."""

    def fail_at_step_5(plan: StepPlan) -> None:
        if plan.step == 5:
            raise RuntimeError("the device is on fire")

    async with running(LONG) as rig, linked(rig, 2) as (busy, idle):
        rig.runner.before_launch = fail_at_step_5
        outbox = await busy.remote.submit([busy.request([1], 1000)])
        with pytest.raises(EngineDeadError, match="on fire") as caught:
            await read_on(outbox)
        assert "on fire" in str(caught.value.__cause__)
        await idle.remote.has_ended.wait()
        for front_end in (busy, idle):
            assert front_end.remote.phase == "failed"
            with pytest.raises(EngineDeadError, match="on fire"):
                front_end.remote.check_alive()
            with pytest.raises(EngineDeadError, match="on fire"):
                await front_end.tokens_of([2])


async def test_the_engines_stop_is_no_failure() -> None:
    """Whoever stopped it meant to."""
    async with running(LONG) as rig, linked(rig) as (front_end,):
        outbox = await front_end.remote.submit([front_end.request([1], 1000)])
        await rig.engine.shutdown()
        with pytest.raises(EngineStoppedError, match="shut down"):
            await read_on(outbox)
        assert front_end.remote.phase == "stopped"


class Compiler:
    """Grammars that are compiled when a test lets them be."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.goes = threading.Event()
        self.threads: set[int] = set()

    def check(self, grammar: str) -> None:
        """Compiles; refuses one that says so."""
        self.threads.add(threading.get_ident())
        self.began.set()
        assert self.goes.wait(10), "nobody lets it go on"
        if grammar == "bad":
            raise ValueError("grammar: no such rule")


def held(grammar: str) -> Sampling:
    """Gives the sampling of a request that a grammar holds."""
    return Sampling(temperature=0.0, grammar=grammar)


async def test_a_grammar_is_compiled_off_the_loop_before_its_request_is_queued() -> None:
    """A step must not wait for it, and neither may other front ends."""
    compiler = Compiler()
    async with running() as rig, linked(rig, check_grammar=compiler.check) as (front_end,):
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                request = front_end.request([1], sampling=held("good"))
                (completion,) = await front_end.complete(request)
                assert completion.token_ids == continuation([1], 8)

            tasks.start_soon(ask)
            await eventually(compiler.began.is_set)
            assert await front_end.tokens_of([2]) == continuation([2], 8)
            compiler.goes.set()
        assert threading.get_ident() not in compiler.threads


async def test_a_grammar_that_does_not_compile_is_refused() -> None:
    """Front ends check first; this one is of a front end that knows another llguidance."""
    compiler = Compiler()
    compiler.goes.set()
    async with running() as rig, linked(rig, check_grammar=compiler.check) as (front_end,):
        with pytest.raises(ValueError, match="no such rule"):
            await front_end.remote.submit([front_end.request([1], sampling=held("bad"))])


async def test_a_request_that_is_left_while_its_grammar_compiles_is_never_queued() -> None:
    """Its close comes before it is there; it would run to its end for nobody."""
    compiler = Compiler()
    async with running() as rig, linked(rig, check_grammar=compiler.check) as (front_end,):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(front_end.remote.submit, [front_end.request([1], sampling=held("good"))])
            await eventually(compiler.began.is_set)
            tasks.cancel_scope.cancel()
        assert await front_end.tokens_of([2]) == continuation([2], 8)
        compiler.goes.set()
        steps_before = len(rig.runner.plans)
        assert await front_end.tokens_of([3]) == continuation([3], 8)
        assert rig.rows_of_steps()[steps_before:] == [1] * 8


async def test_closing_what_has_ended_or_never_was_does_nothing() -> None:
    """A front end may close a request in the moment in which it ends."""
    async with running() as rig, linked(rig) as (front_end,):
        request = front_end.request([1])
        await front_end.complete(request)
        out = FrameWriter()
        out.add(CloseRequests([request.request_id, front_end.remote.next_request_id()]))
        await front_end.stream.send(out.take())
        assert await front_end.tokens_of([2]) == continuation([2], 8)
