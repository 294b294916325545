"""Runs checked calls on an engine and makes results of what comes back."""

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import anyio
from msgspec import Struct, structs

from megallm.core_async.engine import Engine
from megallm.core_async.intake import Call
from megallm.core_async.messages import Completion, NewRequest, Progress, RequestId
from megallm.core_async.result import (
    Result,
    Times,
    completed_result,
    completes_quickly,
    draft_result,
    empty_result,
    failed_result,
)
from megallm.core_async.tokenizers import TokenizerAdapter


class ProgressReader(Protocol):
    """Who is told how a call gets on; called in the engine's loop, so it is quick and never raises."""

    def add_tokens(self, num_tokens: int) -> None:
        """So many new output tokens came."""
        ...

    def add_completion(self, completion: Completion) -> None:
        """A prompt ended."""
        ...


class Drafts:
    """Results of a call made ahead, after each step, while the device is busy with the next one.

    A few get all that does not wait for the output, and those whose prompt has ended get the rest. Made in
    the loop, so what takes long is left to the end: results of long prompts, log-probs, and segments.
    """

    MAX_TOKENS = 4096
    """Of a prompt whose result is made ahead."""
    AT_ONCE = 4
    """Results begun between two steps, 0.1 ms each."""
    COMPLETED_AT_ONCE = 64
    """Results completed between two steps, 0.01 ms each."""

    def __init__(self, call: Call, tokenizer: TokenizerAdapter) -> None:
        self._tokenizer = tokenizer
        self._entries = {entry.request_id: entry for entry in call.entries if entry.request is not None}
        self._left = iter([each for each in self._entries.values() if len(each.token_ids) <= self.MAX_TOKENS])
        self._begun: dict[RequestId, Result] = {}
        self._ended: deque[Completion] = deque()
        """What came of those that may be completed."""
        self._complete: dict[RequestId, Result] = {}

    @property
    def num_begun(self) -> int:
        """Results that wait for their output, or for who takes what takes long."""
        return len(self._begun)

    @property
    def num_complete(self) -> int:
        """Results that wait to be taken."""
        return len(self._complete)

    def make_some(self, ended: Iterable[Completion], times: Times) -> None:
        """Begins the next ones, and completes those of prompts that have `ended` since the last time."""
        for entry in itertools.islice(self._left, self.AT_ONCE):
            self._begun[entry.request_id] = draft_result(entry, self._tokenizer)
        self._ended.extend(each for each in ended if completes_quickly(self._entries[each.request_id], each))
        for _ in range(min(len(self._ended), self.COMPLETED_AT_ONCE)):
            completion = self._ended.popleft()
            if completion.request_id in self._begun:
                self._complete[completion.request_id] = self.take(completion, times)

    def take(self, completion: Completion, times: Times) -> Result:
        """Gives a prompt's result, once; makes what was not made ahead."""
        request_id = completion.request_id
        if (result := self._complete.pop(request_id, None)) is not None:
            return result
        entry, draft = self._entries[request_id], self._begun.pop(request_id, None)
        return completed_result(entry, completion, self._tokenizer, times, draft)


class Outcome(Struct):
    """What the engine gave for one call."""

    completions: dict[RequestId, Completion]
    times: Times
    drafts: Drafts | None = None


async def run_to_completion(
    engine: Engine,
    requests: list[NewRequest],
    reader: ProgressReader | None,
    drafts: Drafts | None = None,
) -> Outcome:
    """Runs requests until each has ended. A cancel aborts them; their blocks are free by the next step.

    Raises: EngineBusy, EngineStoppedError, EngineDeadError.
    """
    now = anyio.current_time()
    times = Times(now, time.time() - now, tracks_pauses=engine.config.tracks_pauses)
    outcome = Outcome({}, times, drafts)
    if not requests:
        engine.check_alive()
        return outcome
    if drafts is not None and reader is None and len(requests) > Drafts.AT_ONCE:
        requests = [_reporting(requests[0]), *requests[1:]]  # it says when a step has ended
    with contextlib.closing(await engine.submit(requests)) as outbox:
        while len(outcome.completions) < len(requests):
            ended: list[Completion] = []
            for parcel in await outbox.take():
                if isinstance(parcel, Completion):
                    outcome.completions[parcel.request_id] = parcel
                    ended.append(parcel)
                    if reader is not None:
                        reader.add_completion(parcel)
                elif isinstance(parcel, Progress) and reader is not None:
                    reader.add_tokens(parcel.num_tokens)
            if drafts is not None and len(outcome.completions) < len(requests):
                drafts.make_some(ended, times)
    return outcome


def _reporting(request: NewRequest) -> NewRequest:
    return structs.replace(request, text=structs.replace(request.text, reports_progress=True))


def results_of(call: Call, outcome: Outcome, tokenizer: TokenizerAdapter) -> list[Result]:
    """Gives one result a prompt, in the order of the call."""
    drafts = Drafts(call, tokenizer) if outcome.drafts is None else outcome.drafts
    results: list[Result] = []
    for entry in call.entries:
        if entry.error is not None:
            results.append(failed_result(entry, entry.error, tokenizer))
        elif entry.request is None:
            results.append(empty_result(entry, tokenizer))
        else:
            results.append(drafts.take(outcome.completions[entry.request_id], outcome.times))
    return results
