"""Runs checked calls on an engine and makes results of what comes back."""

import contextlib
import time
from typing import Protocol

import anyio
from msgspec import Struct

from megallm.core_async.engine import Engine
from megallm.core_async.intake import Call
from megallm.core_async.messages import Completion, NewRequest, Progress, RequestId
from megallm.core_async.result import Result, Times, completed_result, empty_result, failed_result
from megallm.core_async.tokenizers import TokenizerAdapter


class ProgressReader(Protocol):
    """Who is told how a call gets on; called in the engine's loop, so it is quick and never raises."""

    def add_tokens(self, num_tokens: int) -> None:
        """So many new output tokens came."""
        ...

    def add_completion(self, completion: Completion) -> None:
        """A prompt ended."""
        ...


class Outcome(Struct):
    """What the engine gave for one call."""

    completions: dict[RequestId, Completion]
    submitted_s: float
    """Loop time of the submission."""
    epoch_s: float
    """Wall time, in seconds since 1970, of loop time 0."""


async def run_to_completion(
    engine: Engine, requests: list[NewRequest], reader: ProgressReader | None
) -> Outcome:
    """Runs requests until each has ended. A cancel aborts them; their blocks are free by the next step.

    Raises: EngineBusy, EngineStoppedError, EngineDeadError.
    """
    now = anyio.current_time()
    outcome = Outcome({}, now, time.time() - now)
    if not requests:
        engine.check_alive()
        return outcome
    with contextlib.closing(await engine.submit(requests)) as outbox:
        while len(outcome.completions) < len(requests):
            for parcel in await outbox.take():
                if isinstance(parcel, Completion):
                    outcome.completions[parcel.request_id] = parcel
                    if reader is not None:
                        reader.add_completion(parcel)
                elif isinstance(parcel, Progress) and reader is not None:
                    reader.add_tokens(parcel.num_tokens)
    return outcome


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
            results.append(completed_result(entry, completion, tokenizer, times))
    return results
