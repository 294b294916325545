"""Runs checked calls on an engine and makes results of what comes back."""

import contextlib
import itertools
import time
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
    """Results of a call made ahead, a few after each step, while the device is busy with the next one.

    They have all that does not wait for the output. Made in the loop, so long prompts are left out: their
    results are made at the end.
    """

    MAX_TOKENS = 4096
    """Of a prompt whose result is made ahead."""
    AT_ONCE = 4
    """Results made between two steps."""

    def __init__(self, call: Call, tokenizer: TokenizerAdapter) -> None:
        self._tokenizer = tokenizer
        self._made: dict[RequestId, Result] = {}
        entries = [entry for entry in call.entries if entry.request is not None]
        self._left = iter([entry for entry in entries if len(entry.token_ids) <= self.MAX_TOKENS])

    def make_some(self) -> None:
        """Makes the next ones."""
        for entry in itertools.islice(self._left, self.AT_ONCE):
            self._made[entry.request_id] = draft_result(entry, self._tokenizer)

    def pop(self, request_id: RequestId) -> Result | None:
        """Gives a result that was made ahead, once."""
        return self._made.pop(request_id, None)


class Outcome(Struct):
    """What the engine gave for one call."""

    completions: dict[RequestId, Completion]
    submitted_s: float
    """Loop time of the submission."""
    epoch_s: float
    """Wall time, in seconds since 1970, of loop time 0."""
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
    outcome = Outcome({}, now, time.time() - now, drafts)
    if not requests:
        engine.check_alive()
        return outcome
    if drafts is not None and reader is None and len(requests) > Drafts.AT_ONCE:
        requests = [_reporting(requests[0]), *requests[1:]]  # it says when a step has ended
    with contextlib.closing(await engine.submit(requests)) as outbox:
        while len(outcome.completions) < len(requests):
            for parcel in await outbox.take():
                if isinstance(parcel, Completion):
                    outcome.completions[parcel.request_id] = parcel
                    if reader is not None:
                        reader.add_completion(parcel)
                elif isinstance(parcel, Progress) and reader is not None:
                    reader.add_tokens(parcel.num_tokens)
            if drafts is not None and len(outcome.completions) < len(requests):
                drafts.make_some()
    return outcome


def _reporting(request: NewRequest) -> NewRequest:
    return structs.replace(request, text=structs.replace(request.text, reports_progress=True))


def results_of(
    call: Call, outcome: Outcome, tokenizer: TokenizerAdapter, *, tracks_pauses: bool = False
) -> list[Result]:
    """Gives one result a prompt, in the order of the call."""
    results: list[Result] = []
    for entry in call.entries:
        if entry.error is not None:
            results.append(failed_result(entry, entry.error, tokenizer))
        elif entry.request is None:
            results.append(empty_result(entry, tokenizer))
        else:
            completion = outcome.completions[entry.request_id]
            times = Times(outcome.submitted_s, outcome.epoch_s, tracks_pauses=tracks_pauses)
            draft = None if outcome.drafts is None else outcome.drafts.pop(entry.request_id)
            results.append(completed_result(entry, completion, tokenizer, times, draft))
    return results
