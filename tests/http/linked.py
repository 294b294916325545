"""An engine of the fake model and front ends of it in one loop, each with a socket between."""

import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, closing

import anyio
from anyio.abc import TaskGroup
from msgspec import structs

from megallm.core_async.messages import (
    Completion,
    Delta,
    NewRequest,
    RequestId,
    Sampling,
    TextSpec,
    pack_ints,
)
from megallm.core_async.transport.byte_stream import ByteStream
from megallm.http.processes.hub import Peer
from megallm.http.processes.remote_engine import RemoteEngine, Wire
from tests.engines import Rig
from tests.fakes import FakeTokenizer

ANSWER_S = 10.0
"""Longer than anything here takes, also on a busy machine."""


class FrontEnd:
    """One front end: what it sees of the engine, and what the engine sees of it."""

    def __init__(self, peer: Peer, remote: RemoteEngine, stream: ByteStream) -> None:
        self.peer = peer
        self.remote = remote
        self.stream = stream
        """Its end of the socket."""
        self.peer_ended = anyio.Event()

    def request(
        self,
        prompt: Sequence[int],
        num_tokens: int = 8,
        *,
        stop_words: tuple[str, ...] = (),
        is_streamed: bool = False,
        sampling: Sampling | None = None,
    ) -> NewRequest:
        """Gives a greedy request of this front end's."""
        request_id = self.remote.next_request_id()
        return NewRequest(
            request_id=request_id,
            prompt=pack_ints(list(prompt)),
            max_new_tokens=num_tokens,
            stop_token_ids=(),
            sampling=sampling or Sampling(temperature=0.0),
            text=TextSpec(request_id, stop_words=stop_words, is_streamed=is_streamed),
        )

    async def complete(self, *requests: NewRequest) -> list[Completion]:
        """Runs requests to their ends; gives what each got, in order."""
        completions: dict[int, Completion] = {}
        with closing(await self.remote.submit(requests)) as outbox:
            while len(completions) < len(requests):
                for parcel in await outbox.take():
                    assert isinstance(parcel, Completion)
                    completions[parcel.request_id] = parcel
        return [completions[request.request_id] for request in requests]

    async def tokens_of(self, prompt: Sequence[int], num_tokens: int = 8) -> list[int]:
        """Gives the greedy continuation of a prompt."""
        (completion,) = await self.complete(self.request(prompt, num_tokens))
        return completion.token_ids

    async def stream_of(self, request: NewRequest) -> list[Delta]:
        """Gives the deltas of a streamed request."""
        deltas: list[Delta] = []
        with closing(await self.remote.submit([request])) as outbox:
            while not (deltas and deltas[-1].finish_reason):
                deltas += [parcel for parcel in await outbox.take() if isinstance(parcel, Delta)]
        return deltas


@asynccontextmanager
async def linked(
    rig: Rig,
    num: int = 1,
    *,
    check_grammar: Callable[[str], None] = lambda _: None,
    max_behind: int = 2**20,
    max_frame_bytes: int = 2**20,
) -> AsyncGenerator[list[FrontEnd]]:
    """Links front ends to an engine; they leave after the block."""
    with anyio.fail_after(ANSWER_S):
        async with anyio.create_task_group() as tasks, contextlib.AsyncExitStack() as stack:
            front_ends: list[FrontEnd] = []
            for _ in range(num):
                ours, theirs = map(ByteStream, socket.socketpair())
                stack.callback(ours.close)
                stack.callback(theirs.close)
                peer = Peer(rig.engine, ours, b"setup", check_grammar, max_behind=max_behind)
                front_end = await link(tasks, peer, theirs, max_frame_bytes)
                front_ends.append(front_end)
            yield front_ends
            tasks.cancel_scope.cancel()


async def link(tasks: TaskGroup, peer: Peer, stream: ByteStream, max_frame_bytes: int) -> FrontEnd:
    """Starts both ends of one link."""
    has_ended = anyio.Event()

    async def run() -> None:
        await peer.run()
        has_ended.set()

    tasks.start_soon(run)
    wire = Wire(stream)
    welcome, early = await wire.welcome()
    assert welcome.setup == b"setup"
    remote = RemoteEngine(wire, welcome, FakeTokenizer().detokenize, max_frame_bytes=max_frame_bytes)
    front_end = FrontEnd(peer, remote, stream)
    front_end.peer_ended = has_ended
    await tasks.start(remote.run, early)
    return front_end


def owned(request: NewRequest, owner: int) -> NewRequest:
    """Gives the request as one of another owner."""
    request_id = RequestId((owner << 40) + 1)
    return structs.replace(
        request, request_id=request_id, text=structs.replace(request.text, request_id=request_id)
    )


def fill(stream: ByteStream) -> None:
    """Writes until the socket takes no more: its peer does not read."""
    while stream.send_now(bytes(2**16)):
        pass
