"""Plans in flight: whom a result concerns, and what it means for each."""

from collections.abc import Sequence

import pytest

from megallm.core_async.messages import (
    Floats,
    Ints,
    ScoredChunk,
    StepResult,
    TopLogProbs,
    pack_floats,
    pack_ints,
    unpack_floats,
    unpack_ints,
)
from megallm.core_async.plan.flight import InFlight, Outcome
from megallm.core_async.plan.request import Request
from tests.plan.requests import decoding, request_of


def top_of(*places: Sequence[tuple[int, float]]) -> TopLogProbs:
    """Gives a table of likeliest tokens, one row a place."""
    pairs = [pair for place in places for pair in place]
    return TopLogProbs(
        len(places[0]), pack_ints([key for key, _ in pairs]), pack_floats([p for _, p in pairs])
    )


def in_flight(*requests: Request) -> InFlight:
    """Gives a step in which requests were computed to their end."""
    step = InFlight(1)
    for request in requests:
        request.num_computed = request.num_tokens
        step.compute(request)
    return step


# ---- when it is planned --------------------------------------------------------------------------


def test_a_chunk_that_leaves_tokens_to_compute_yields_none() -> None:
    """What follows a part of the prompt is known already."""
    step, request = InFlight(1), request_of(1, [7, 8, 9])
    request.num_computed = 2
    assert not step.compute(request)
    assert (request.num_tokens, request.is_decoding, request.has_started) == (3, False, False)
    assert (step.sampled, step.firsts, step.complete, step.last) == ([], [], [], [])


def test_the_last_chunk_yields_a_token_whose_id_is_on_the_device() -> None:
    """The next step computes it before the host has seen it."""
    step, request = InFlight(1), request_of(1, [7, 8, 9])
    request.num_computed = 3
    assert step.compute(request)
    assert (request.num_tokens, request.num_unknown, request.is_decoding) == (4, 1, True)
    assert (step.sampled, step.firsts, step.last) == ([request], [request], [])


def test_a_request_is_introduced_once() -> None:
    """The detokeniser starts a text for each that it hears of; recomputed, a request goes on with its own."""
    request = request_of(1)
    assert in_flight(request).firsts == [request]
    request.tokens.append(5)
    request.leave_row()
    again = in_flight(request)
    assert (again.sampled, again.firsts) == ([request], [])


def test_the_last_token_that_a_request_may_have_is_noted_when_it_is_planned() -> None:
    """Its end is known before its id is: no row is looked at for it in every step."""
    request = request_of(1, num_new=1)
    assert in_flight(request).last == [request]


def test_a_prompt_that_is_only_scored_ends_without_a_token() -> None:
    """There is nothing to sample, and somebody waits for the scores."""
    request = request_of(1, num_new=0, scores=True)
    step = in_flight(request)
    assert (step.sampled, step.complete) == ([], [request])
    assert request.num_tokens == 3


def test_the_targets_of_a_scored_prompt_are_its_next_tokens() -> None:
    """The log-prob of each prompt token after the first is wanted once, whatever the chunks."""
    step, request = InFlight(1), request_of(1, [7, 8, 9, 10], scores=True)
    assert list(step.score(request, 0, 3)) == [8, 9, 10]
    assert (request.num_scored, step.scored, step.firsts) == (4, [(request, 3)], [request])
    assert list(step.score(request, 3, 1)) == []
    assert step.scored == [(request, 3)]


def test_a_scored_chunk_that_ends_the_prompt_has_no_target_at_its_end() -> None:
    """What follows the prompt is sampled and not given."""
    step, request = InFlight(1), request_of(1, [7, 8, 9], scores=True)
    assert list(step.score(request, 0, 3)) == [8, 9, -1]
    assert step.scored == [(request, 2)]


def test_nothing_is_scored_twice() -> None:
    """A request that was preempted computes again what it has reported."""
    step, request = InFlight(1), request_of(1, [7, 8, 9, 10], scores=True)
    step.score(request, 0, 2)
    assert list(step.score(request, 0, 4)) == [-1, -1, 10, -1]
    assert step.scored == [(request, 2), (request, 1)]


def test_a_prompt_that_is_not_scored_has_no_targets() -> None:
    """Most have not: nothing is projected but the rows that sample."""
    step, request = InFlight(1), request_of(1)
    assert list(step.score(request, 0, 3)) == []
    assert (step.scored, step.firsts) == ([], [])


# ---- when its result comes -----------------------------------------------------------------------


def test_each_scored_chunk_gets_its_part_of_the_scores() -> None:
    """They come as one column for all rows."""
    step = InFlight(1)
    first, second = request_of(1, [7, 8, 9], scores=True), request_of(2, [5, 6], scores=True)
    step.score(first, 0, 3)
    step.score(second, 0, 2)
    table = [[(8, -1.0), (1, -2.0)], [(9, -3.0), (2, -4.0)], [(6, -5.0), (3, -6.0)]]
    result = StepResult(1, Ints(b""), scores=pack_floats([-0.5, -1.5, -2.5]), score_top=top_of(*table))
    assert step.scores_of(result) == [
        ScoredChunk(first.request_id, pack_floats([-0.5, -1.5]), top_of(*table[:2])),
        ScoredChunk(second.request_id, pack_floats([-2.5]), top_of(table[2])),
    ]
    result = StepResult(1, Ints(b""), scores=pack_floats([-0.5, -1.5, -2.5]))
    assert [chunk.top for chunk in step.scores_of(result)] == [None, None]


def test_an_outcome_takes_over_a_result_as_it_is() -> None:
    """The columns of a step go to the detokeniser without being unpacked."""
    first, second = decoding(1, [7], [8], row=0), request_of(2)
    step = in_flight(first, second)
    outcome, top = Outcome(), top_of([(5, -1.0)], [(6, -2.0)])
    outcome.take(step, StepResult(1, pack_ints([5, 6]), log_probs=pack_floats([-1.0, -2.0]), top=top))
    batch = outcome.batch(2.5)
    assert (batch.requests, batch.tokens, batch.time_s) == ([1, 2], pack_ints([5, 6]), 2.5)
    assert (batch.log_probs, batch.top) == (pack_floats([-1.0, -2.0]), top)
    assert (batch.started, batch.scored, batch.finished) == ([second.new.text], [], [])


def test_a_request_that_ended_before_its_first_result_is_not_started() -> None:
    """Nobody would ever end its text."""
    request = request_of(1)
    step = in_flight(request)
    request.finish_reason = "abort"
    outcome = Outcome()
    outcome.take(step, StepResult(1, pack_ints([5])))
    assert outcome.batch(0.0).started == []


@pytest.mark.parametrize("has_log_probs", [False, True])
def test_tokens_of_requests_that_have_ended_are_dropped(*, has_log_probs: bool) -> None:
    """They were sampled by plans already in flight; their readers have the last token."""
    requests = [request_of(number) for number in (1, 2, 3)]
    outcome = Outcome()
    log_probs = pack_floats([-1.0, -2.0, -3.0]) if has_log_probs else Floats(b"")
    top = top_of([(4, -1.0)], [(5, -2.0)], [(6, -3.0)]) if has_log_probs else None
    outcome.take(in_flight(*requests), StepResult(1, pack_ints([4, 5, 6]), log_probs=log_probs, top=top))
    outcome.keep([0, 2])
    batch = outcome.batch(0.0)
    assert (batch.requests, list(unpack_ints(batch.tokens))) == ([1, 3], [4, 6])
    assert list(unpack_floats(batch.log_probs)) == ([-1.0, -3.0] if has_log_probs else [])
    assert batch.top == (top_of([(4, -1.0)], [(6, -3.0)]) if has_log_probs else None)


def test_an_outcome_without_a_result_is_empty() -> None:
    """An abort is reported although no step has run."""
    outcome = Outcome()
    outcome.finished.append(request_of(1).finished("abort", None))
    batch = outcome.batch(1.0)
    assert (batch.requests, batch.tokens, batch.scored, batch.top) == ([], Ints(b""), [], None)
    assert [ending.finish_reason for ending in batch.finished] == ["abort"]
