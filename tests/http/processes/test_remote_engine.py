"""The engine over a socket: what a front end gets is what it would get in the engine's own process."""

import socket
from collections.abc import Sequence
from contextlib import closing

import anyio
import pytest

from megallm.core_async.errors import EngineDeadError, InvalidRequestError
from megallm.core_async.messages import (
    Delta,
    EngineStats,
    Floats,
    NewRequest,
    Sampling,
    TextSpec,
    TokenBatch,
    pack_ints,
)
from megallm.core_async.plan.pace import MIN_STREAMS
from megallm.core_async.transport.byte_stream import ByteStream
from megallm.core_async.transport.frames import Answer, EngineEnded, EngineState, Fault, StepOutput, Welcome
from megallm.core_async.transport.framing import FrameError, FrameWriter
from megallm.http.processes.remote_engine import RemoteEngine, Wire
from megallm.http.service import EnginePort
from tests.engines import engine_config, running
from tests.fakes import FakeTokenizer, continuation
from tests.http.linked import linked
from tests.http.loopback import eventually

pytestmark = pytest.mark.anyio

LONG = engine_config(num_blocks=512, max_sequence_length=1024)


def text_of(tokens: Sequence[int]) -> str:
    """Gives the text of tokens."""
    return FakeTokenizer().detokenize(tokens)


async def test_it_is_an_engine_port_and_so_is_the_engine() -> None:
    """The app is the same in both processes."""
    async with running() as rig, linked(rig) as (front_end,):
        ports: list[EnginePort] = [rig.engine, front_end.remote]
        assert [port.config for port in ports] == [rig.engine.config] * 2
        assert [port.phase for port in ports] == ["running"] * 2
        for port in ports:
            port.check_alive()
            assert isinstance(port.stats(), EngineStats)
        assert ports[0].next_request_id() != ports[1].next_request_id()


async def test_a_stream_is_the_whole_text_and_all_tokens() -> None:
    """The text is made here, of this front end's rows alone, while others run in the same batch."""
    async with running() as rig, linked(rig, 2) as (first, second):
        streams: dict[int, list[Delta]] = {}

        async def read(index: int) -> None:
            front_end = (first, second)[index % 2]
            streams[index] = await front_end.stream_of(front_end.request([index], 30, is_streamed=True))

        async with anyio.create_task_group() as tasks:
            for index in range(6):
                tasks.start_soon(read, index)
        for index, deltas in streams.items():
            expected = continuation([index], 30)
            assert [token for delta in deltas for token in delta.token_ids] == expected
            assert "".join(delta.text for delta in deltas) == text_of(expected)
            assert deltas[-1].finish_reason == "length"


async def test_a_stop_word_ends_the_request_in_the_engine() -> None:
    """It is found in the text, which the engine's process does not make; its blocks must come back."""
    async with running(LONG) as rig, linked(rig) as (front_end,):
        tokens = continuation([3], 40)
        word = text_of(tokens[20:22])
        assert word not in text_of(tokens[:21])
        (completion,) = await front_end.complete(front_end.request([3], 1000, stop_words=(word,)))
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (
            text_of(tokens[:20]),
            "stop",
            word,
        )
        await eventually(lambda: front_end.remote.stats().running == 0)


async def test_closing_an_outbox_aborts_the_request() -> None:
    """A client that left must not hold blocks."""
    async with running(LONG) as rig, linked(rig) as (front_end,):
        with closing(await front_end.remote.submit([front_end.request([1], 1000, is_streamed=True)])) as box:
            await box.take()
        await eventually(lambda: rig.engine.stats().step > 0 and rig.engine.stats().running == 0)


async def test_a_submission_that_is_cancelled_leaves_nothing_queued() -> None:
    """The client left before the engine had answered."""
    async with running(LONG) as rig, linked(rig) as (front_end,):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(front_end.remote.submit, [front_end.request([1], 1000)])
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert await front_end.tokens_of([2]) == continuation([2], 8)
        await eventually(lambda: rig.engine.stats().running == 0)


async def test_times_are_of_the_front_ends_own_clock() -> None:
    """A first token that came before its request is no latency; trio's clock begins anywhere."""
    async with running() as rig, linked(rig) as (front_end,):
        before = anyio.current_time()
        (completion,) = await front_end.complete(front_end.request([1]))
        assert completion.first_token_s is not None
        assert completion.last_token_s is not None
        assert before <= completion.first_token_s <= completion.last_token_s <= anyio.current_time()
        assert all(before <= time_s <= anyio.current_time() for _, time_s in completion.events)


async def test_a_submission_past_one_frame_is_refused_and_harms_nobody() -> None:
    """It is one client's fault."""
    async with running() as rig, linked(rig, max_frame_bytes=5000) as (front_end,):
        with pytest.raises(InvalidRequestError, match=r"too large.*a frame has 5,000 at most"):
            await front_end.remote.submit([front_end.request([1] * 100) for _ in range(20)])
        assert await front_end.tokens_of([1]) == continuation([1], 8)


async def test_a_process_that_goes_before_its_first_word_is_an_end() -> None:
    """The user stopped the server while its front ends were starting."""
    ours, theirs = map(ByteStream, socket.socketpair())
    ours.close()
    with pytest.raises(EngineDeadError, match="has gone"):
        await Wire(theirs).welcome()
    theirs.close()


async def test_another_first_word_than_welcome_is_refused() -> None:
    """What follows it would make no sense."""
    ours, theirs = map(ByteStream, socket.socketpair())
    out = FrameWriter()
    out.add(EngineState(EngineStats(), "running"))
    await ours.send(out.take())
    with pytest.raises(FrameError, match="is a EngineState, no Welcome"):
        await Wire(theirs).welcome()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("fault", ["nonsense", "a second welcome", "nothing more"])
async def test_an_engine_that_goes_or_talks_nonsense_ends_every_call(fault: str) -> None:
    """Nothing hangs: neither what was asked, nor what is asked then."""
    ours, theirs = map(ByteStream, socket.socketpair())
    welcome = Welcome(1, engine_config(), EngineStats(), "running", b"")
    out = FrameWriter()
    out.add(welcome)
    out.add(Answer(17, "running"))  # to nobody: whoever asked was cancelled
    await ours.send(out.take())
    wire = Wire(theirs)
    came, early = await wire.welcome()
    remote = RemoteEngine(wire, came, text_of)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(remote.run, early)

            async def pause() -> None:
                with pytest.raises(EngineDeadError, match="has gone"):
                    await remote.pause()

            tasks.start_soon(pause)
            assert await ours.receive()
            if fault == "nonsense":
                await ours.send(b"\x01\x00\x00\x00\xc1")
            elif fault == "a second welcome":
                out.add(welcome)
                await ours.send(out.take())
            else:
                ours.close()
            await remote.has_ended.wait()
    with pytest.raises(EngineDeadError):
        await remote.submit([])
    ours.close()


@pytest.mark.parametrize("ends", [False, True], ids=["stands still", "ends"])
async def test_an_engine_that_takes_no_more_steps_leaves_no_token_untold(ends: bool) -> None:  # noqa: FBT001 - pytest's
    """Tokens of many streams wait for those of the next step, which a pause, or a failure, keeps away."""
    ours, theirs = map(ByteStream, socket.socketpair())
    out = FrameWriter()
    out.add(Welcome(1, engine_config(), EngineStats(), "running", b""))
    await ours.send(out.take())
    wire = Wire(theirs)
    remote = RemoteEngine(wire, (await wire.welcome())[0], text_of)
    requests = [remote.next_request_id() for _ in range(MIN_STREAMS)]
    specs = [TextSpec(request_id, is_streamed=True) for request_id in requests]
    deltas: list[Delta] = []
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            await tasks.start(remote.run, [])
            out.add(Answer(0, "running"))
            for number, started in enumerate((specs, [])):
                tokens = pack_ints([number] * MIN_STREAMS)
                batch = TokenBatch(started, requests, tokens, Floats(b""), [], number / 1000)
                out.add(StepOutput(batch, EngineStats()))
            if ends:
                out.add(EngineEnded(Fault(EngineDeadError.__name__, "gone"), "failed"))
            submission = [
                NewRequest(spec.request_id, pack_ints([1]), 8, (), Sampling(), spec) for spec in specs
            ]

            async def answer() -> None:
                assert await ours.receive()
                await ours.send(out.take())

            tasks.start_soon(answer)
            with closing(await remote.submit(submission)) as outbox:
                while len(deltas) < 2 * MIN_STREAMS:
                    deltas += [parcel for parcel in await outbox.take() if isinstance(parcel, Delta)]
                if ends:
                    with pytest.raises(EngineDeadError, match="gone"):
                        await outbox.take()
            tasks.cancel_scope.cancel()
    assert [token for delta in deltas for token in delta.token_ids] == [0] * MIN_STREAMS + [1] * MIN_STREAMS
    ours.close()


async def test_an_abort_reaches_every_front_end_but_the_one_that_was_asked() -> None:
    """Front ends share a port: who asks for an abort can't choose the one that has the request."""
    async with running() as rig, linked(rig, 3) as front_ends:
        heard: list[tuple[int, str | None]] = []
        for index, front_end in enumerate(front_ends):
            front_end.remote.on_abort = lambda request_id, index=index: heard.append((index, request_id))
        front_ends[1].remote.abort_elsewhere("one")
        await eventually(lambda: len(heard) == 2)
        rig.engine.abort_elsewhere(None)
        await eventually(lambda: len(heard) == 5)
        assert sorted(heard[:2]) == [(0, "one"), (2, "one")]
        assert sorted(heard[2:]) == [(0, None), (1, None), (2, None)]
