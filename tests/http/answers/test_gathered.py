"""Deltas gathered into the completion they would have been."""

import pytest

from megallm.core_async.messages import Delta, Finished, RequestId
from megallm.http.answers.gathered import Gathered


def test_all_of_them_are_the_whole() -> None:
    """Clients of a stream find it once more in the last chunk."""
    ending = Finished(RequestId(7), "stop", 3, num_cached_tokens=4, num_preemptions=1, policy_epoch=((0, 2),))
    gathered = Gathered()
    gathered.add(Delta("a", [1], [-1.0]), 1.0)
    assert gathered.last_s == 1.0
    gathered.add(Delta("bc", [2, 3], [-2.0, -3.0], finish_reason="stop", stop_reason=3, ending=ending), 2.0)
    whole = gathered.completion()
    assert (whole.text, whole.token_ids, whole.log_probs) == ("abc", [1, 2, 3], [-1.0, -2.0, -3.0])
    assert (whole.request_id, whole.finish_reason, whole.stop_reason) == (7, "stop", 3)
    assert (whole.num_cached_tokens, whole.num_preemptions, whole.policy_epoch) == (4, 1, ((0, 2),))


def test_the_callers_deltas_stay_as_they_are() -> None:
    """They are shared with whoever else reads them."""
    first, gathered = Delta("a", [1], [-1.0]), Gathered()
    gathered.add(first, 1.0)
    gathered.add(Delta("b", [2], [-2.0], finish_reason="length"), 1.0)
    assert (first.token_ids, first.log_probs) == ([1], [-1.0])
    assert gathered.completion().finish_reason == "length"


def test_before_the_last_there_is_no_whole() -> None:
    """Nobody knows yet why it ended."""
    gathered = Gathered()
    with pytest.raises(AssertionError, match="last delta"):
        gathered.completion()
    gathered.add(Delta("a", [1]), 1.0)
    with pytest.raises(AssertionError, match="last delta"):
        gathered.completion()
