"""What came of one request, counted as its choices end."""

import pytest

from megallm.http.answers.outcome import Outcome, Usage, queue_s_of


def test_usage_is_as_the_api_has_it() -> None:
    """Clients pay by it."""
    assert Usage(3, 2, 1).as_json() == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_the_earliest_choice_tells_the_times() -> None:
    """A request's first token is the first of any choice."""
    outcome = Outcome()
    outcome.usage.prompt_tokens = 7
    for seconds in (0.5, 0.25, 0.75):
        outcome.add_first_token(seconds)
    outcome.add_end("stop", 2, 0.2)
    outcome.add_end("length", 3, 0.1)
    outcome.add_end("stop", 4, None)
    assert outcome.as_noted() == {
        "prompt_tokens": 7,
        "cached_tokens": 0,
        "output_tokens": 9,
        "finished": {"stop": 2, "length": 1},
        "first_token_seconds": 0.25,
        "queue_seconds": 0.1,
    }


def test_what_never_ran_has_no_times() -> None:
    """A zero would pull every average down."""
    outcome = Outcome()
    outcome.add_end("abort", 0, None)
    assert outcome.as_noted().keys() == {"prompt_tokens", "cached_tokens", "output_tokens", "finished"}


@pytest.mark.parametrize(
    ("events", "seconds"),
    [
        ((("add_context", 12.5), ("evict", 13.0), ("add_context", 14.0)), 2.5),
        ((("pause", 11.0),), None),
        ((("add_context", 9.0),), 0.0),
    ],
)
def test_a_queue_ends_with_the_first_admission(
    events: tuple[tuple[str, float], ...], seconds: float | None
) -> None:
    """A preempted request waits again, which is no queue; a clock that is a little behind is none either."""
    assert queue_s_of(events, 10.0) == seconds
