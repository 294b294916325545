"""Many streams, each given something now and then: none late, none forgotten, together so much at most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.messages import RequestId
from megallm.core_async.plan.pace import MAX_GIVEN_PER_S, MAX_INTERVAL_S, MIN_STREAMS, Pace

STEP_S = 0.02


def pace_of(num_streams: int) -> Pace:
    """Gives the pace of so many streams."""
    pace = Pace()
    for number in range(num_streams):
        pace.begin(RequestId(number))
    return pace


def given_at(pace: Pace, request_id: RequestId, times_s: list[float]) -> list[int]:
    """Gives the numbers of the steps, at these times, after which a stream is given what it has."""
    steps: list[int] = []
    for number, time_s in enumerate(times_s):
        pace.time_s = time_s
        if not pace.defers(request_id):
            steps.append(number)
    return steps


def test_a_few_streams_are_given_every_token() -> None:
    """Whoever watches one answer grow must not wait for the sake of a load that is not there."""
    pace = pace_of(MIN_STREAMS - 1)
    assert given_at(pace, RequestId(0), [0.0, 0.0, 1e-6, 2e-6]) == [0, 1, 2, 3]
    assert not pace.has_waiting


@pytest.mark.parametrize(("num_streams", "num_together"), [(100, 1), (200, 2), (256, 3), (1000, 3)])
def test_many_streams_are_given_several_tokens_at_once(num_streams: int, num_together: int) -> None:
    """At 256 streams and 20 ms a step two writes in three are saved; the first token is not late."""
    times_s = [number * STEP_S for number in range(9)]
    given = given_at(pace_of(num_streams), RequestId(3), times_s)
    assert given == list(range(0, 9, num_together))


def test_slow_steps_let_nobody_wait() -> None:
    """To wait for another step's token would be felt then, and saves little."""
    times_s = [number * 2 * MAX_INTERVAL_S for number in range(4)]
    assert given_at(pace_of(4096), RequestId(3), times_s) == [0, 1, 2, 3]


@given(st.integers(1, 2000))
def test_together_they_are_given_so_much_a_second_at_most(num_streams: int) -> None:
    """That is what bounds a front end's work, up to the interval that a reader would notice."""
    interval_s = pace_of(num_streams).interval_s
    assert 0.0 <= interval_s <= MAX_INTERVAL_S
    if num_streams >= MIN_STREAMS and interval_s < MAX_INTERVAL_S:
        assert num_streams / interval_s == pytest.approx(MAX_GIVEN_PER_S)


def test_the_interval_follows_the_streams_that_are_left() -> None:
    """The last ones of a burst are few."""
    pace = pace_of(256)
    for number in range(250):
        pace.end(RequestId(number))
    assert pace.interval_s == 0.0
    pace.end(RequestId(9999))  # of a request that is no stream
    assert not pace.defers(RequestId(9999))


def test_a_stream_that_has_no_more_steps_is_late_and_given_once() -> None:
    """It was preempted; the others go on."""
    pace = pace_of(256)
    (gone, other) = RequestId(1), RequestId(2)
    given_at(pace, gone, [0.0, STEP_S])
    given_at(pace, other, [STEP_S])
    assert pace.take_late() == []
    given_at(pace, other, [2 * STEP_S, 3 * STEP_S])
    assert pace.has_waiting
    assert pace.take_late() == []
    given_at(pace, other, [4 * STEP_S])
    assert list(pace.take_late()) == [gone]
    assert list(pace.take_late()) == []


def test_what_is_taken_when_no_step_comes_counts_as_given() -> None:
    """Else the step after a stall would find all streams due at once, a token later."""
    pace = pace_of(256)
    given_at(pace, RequestId(1), [0.0, STEP_S])
    assert list(pace.take_all()) == [1]
    assert not pace.has_waiting
    assert given_at(pace, RequestId(1), [number * STEP_S for number in range(1, 5)]) == [3]


def test_a_stream_that_ends_waits_no_more() -> None:
    """Its last tokens have gone out with its end."""
    pace = pace_of(256)
    given_at(pace, RequestId(1), [0.0, STEP_S])
    pace.end(RequestId(1))
    assert not pace.has_waiting
    assert list(pace.take_all()) == []
