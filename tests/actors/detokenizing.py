"""A detokeniser fed a step at a time, and a reader of what it gives."""

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from megallm.core_async.actors.detokenizer import Detokenizer, Parcel
from megallm.core_async.kit.outbox import Outbox, Outboxes
from megallm.core_async.messages import (
    Delta,
    Finished,
    Floats,
    RequestId,
    TextSpec,
    TokenBatch,
    pack_ints,
)
from megallm.core_async.plan.pace import Pace
from megallm.core_async.step_times import StepTimes

PIECES = ["a", "b", "c", "ab", "ba", "bca", "aab", " ", ""]
"""The text of each token id: some are more than one character, one is none."""


def text_of(tokens: Sequence[int]) -> str:
    """Gives the text of tokens, as this file's tokenizer does."""
    return "".join(PIECES[token] for token in tokens)


def finished(key: int, reason: str = "length", stop_reason: int | None = None) -> Finished:
    """Gives the message that a request ended."""
    return Finished(RequestId(key), reason, stop_reason)


class Rig:
    """A detokeniser and its outboxes, fed a step at a time."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.num_calls = 0
        self.pace = pace
        self.times = StepTimes()
        self.outboxes = Outboxes[Parcel](self._count_call)
        self.detokenizer = Detokenizer(text_of, self.outboxes, self.times, pace=pace)
        self._heard: set[int] = set()
        self.specs: dict[int, TextSpec] = {}

    def _count_call(self) -> None:
        self.num_calls += 1

    def open(self, *specs: TextSpec) -> Outbox[Parcel]:
        """Opens one outbox for some requests."""
        self.specs |= {spec.request_id: spec for spec in specs}
        return self.outboxes.open([spec.request_id for spec in specs])

    def batch(self, tokens: dict[int, int], *ends: Finished, time_s: float = 0.0) -> TokenBatch:
        """Gives one step's batch: one token each; a request's first comes with its spec."""
        new = [self.specs[key] for key in tokens if key not in self._heard and key in self.specs]
        self._heard |= tokens.keys()
        return TokenBatch(
            started=new,
            requests=[RequestId(key) for key in tokens],
            tokens=pack_ints(list(tokens.values())),
            log_probs=Floats(b""),
            finished=list(ends),
            time_s=time_s,
        )

    def feed(self, tokens: dict[int, int], *ends: Finished, time_s: float = 0.0) -> None:
        """Has one batch handled."""
        self.handle(self.batch(tokens, *ends, time_s=time_s))

    def handle(self, batch: TokenBatch) -> None:
        """Has a batch handled; handling it waits for nothing."""
        if self.pace is not None:
            self.pace.time_s = batch.time_s
        run_through(self.detokenizer.handle(batch))


def run_through(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that must not suspend."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


@dataclass
class Stream:
    """What a reader of deltas has put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    endings: list[tuple[str | None, int | str | None]] = field(
        default_factory=list[tuple[str | None, int | str | None]]
    )

    def read(self, outbox: Outbox[Parcel]) -> None:
        """Takes what is there; nothing comes after the end."""
        for parcel in outbox.take_nowait():
            assert isinstance(parcel, Delta)
            assert not self.endings
            assert parcel.text or parcel.token_ids or parcel.finish_reason
            self.text += parcel.text
            self.token_ids += parcel.token_ids
            if parcel.finish_reason is not None:
                self.endings.append((parcel.finish_reason, parcel.stop_reason))
