"""Streams of deltas: one request's output as it comes, for async readers.

Leaving a stream early, however it happens, aborts the request. No task group is held open across
a yield: a stream is a plain object whose cleanup is synchronous.
"""

import functools
from collections.abc import Awaitable, Callable
from typing import Protocol, Self

from megallm.core_async.actors.detokenizer import Parcel
from megallm.core_async.engine import Engine
from megallm.core_async.intake import Call
from megallm.core_async.kit.outbox import Outbox
from megallm.core_async.messages import Delta, NewRequest

NOTHING_TO_GENERATE = Delta("", [], finish_reason="length")


class StreamState:
    """What a stream's reader and its cleanup share: the request, its outbox, and whether it has ended."""

    def __init__(self, engine: Engine, call: Call) -> None:
        """Raises: InvalidRequestError when the prompt can't run."""
        (entry,) = call.entries
        if entry.error is not None:
            raise entry.error
        self._engine = engine
        self.request: NewRequest | None = entry.request
        self.outbox: Outbox[Parcel] | None = None
        self.has_ended = False

    async def take(self) -> Delta | None:
        """Waits for the next delta, in the engine's loop; several that wait come as one.

        None when another task or thread leaves the stream meanwhile.
        Raises: EngineBusy, EngineStoppedError, EngineDeadError.
        """
        if self.request is None:
            self._engine.check_alive()
            self.has_ended = True
            return NOTHING_TO_GENERATE
        if self.outbox is None:
            self.outbox = await self._engine.submit([self.request])
            if self.has_ended:  # left while the submission was under way
                self._close()
        try:
            parcels = await self.outbox.take()
        except _LeftError:
            return None
        delta = functools.reduce(joined, [parcel for parcel in parcels if isinstance(parcel, Delta)])
        if delta.finish_reason is not None:
            self.has_ended = True
        return delta

    def leave(self) -> None:
        """Aborts the request unless it has ended; callable from any thread, and in any state."""
        if not self.has_ended:
            self.has_ended = True
            if self.outbox is not None:
                self._engine.post(self._close)

    def _close(self) -> None:
        """Closes the outbox, in the engine's loop; whoever waits for it is let go."""
        assert self.outbox is not None, "nothing was submitted"
        self.outbox.fail(_LeftError)
        self.outbox.close()


class _LeftError(Exception):
    """Ends the wait of a stream's reader when another task or thread has left the stream."""


class RunInLoop(Protocol):
    """Runs an async function in the engine's loop, from the loop of the caller."""

    def __call__[*A, T](self, function: Callable[[*A], Awaitable[T]], *args: *A) -> Awaitable[T]: ...


class AsyncStream:
    """An async iterator of `Delta`, for one reader; the last has a `finish_reason`.

    `aclose`, an error or a cancel while waiting, leaving an `async with` block, and garbage
    collection abort the request; a reader that waits meanwhile is at the end of the stream.
    """

    def __init__(self, state: StreamState, run_in_loop: RunInLoop) -> None:
        self._state = state
        self._run_in_loop = run_in_loop

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Waits for the next delta.

        Raises: StopAsyncIteration after the last; EngineBusy, EngineStoppedError, EngineDeadError.
        """
        if self._state.has_ended:
            raise StopAsyncIteration
        try:
            delta = await self._run_in_loop(self._state.take)
        except BaseException:
            self._state.leave()
            raise
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def aclose(self) -> None:
        """Aborts the request unless it has ended; its blocks are free by the next step."""
        self._state.leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: object, exc: object, traceback: object) -> None:
        self._state.leave()

    def __del__(self) -> None:
        self._state.leave()


def joined(first: Delta, second: Delta) -> Delta:
    """Gives two deltas in a row as one."""
    return Delta(
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        log_probs=_joined_lists(first.log_probs, second.log_probs),
        top_n_logprobs=_joined_lists(first.top_n_logprobs, second.top_n_logprobs),
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        request_id=second.request_id,
        top=_joined_lists(first.top, second.top),
        prompt_log_probs=_joined_lists(first.prompt_log_probs, second.prompt_log_probs),
        prompt_top=_joined_lists(first.prompt_top, second.prompt_top),
        ending=second.ending,
    )


def _joined_lists[T](first: list[T] | None, second: list[T] | None) -> list[T] | None:
    return second if first is None else first if second is None else first + second
