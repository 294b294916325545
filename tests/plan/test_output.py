"""One request's output: what its reader gets at each point, and at the end."""

from collections.abc import Sequence

import pytest

from megallm.core_async.messages import (
    Finished,
    Floats,
    RequestId,
    ScoredChunk,
    TextSpec,
    TopLogProbs,
    pack_floats,
    pack_ints,
)
from megallm.core_async.plan.output import Output, by_text, places_of

ID = RequestId(7)


def letters(ids: Sequence[int]) -> str:
    """Gives a letter for each id: 1 is a."""
    return "".join(chr(96 + each) for each in ids)


def grown(spec: TextSpec, ids: Sequence[int]) -> Output:
    """Gives an output that got these ids, as the detokeniser appends them."""
    output = Output(spec, letters)
    for time_s, token in enumerate(ids):
        output.token_ids.append(token)
        output.last_s = float(time_s)
        if output.first_s is None:
            output.first_s = float(time_s)
        if output.stream is not None:
            output.extend(None)
    return output


def ended(reason: str, stop_reason: int | str | None = None) -> Finished:
    """Gives the message that the request ended."""
    return Finished(ID, reason, stop_reason)


def test_the_id_that_ends_a_request_is_kept_and_has_no_text() -> None:
    """Trainers need the id, readers do not want it."""
    completion = grown(TextSpec(ID), [1, 2, 3]).completion(ended("stop", 3))
    assert (completion.text, completion.token_ids) == ("ab", [1, 2, 3])


def test_keep_stop_leaves_it_in_the_text() -> None:
    """`detokenize_stop_sequence` asks for that."""
    completion = grown(TextSpec(ID, keep_stop=True), [1, 2, 3]).completion(ended("stop", 3))
    assert completion.text == "abc"


def test_an_output_cut_by_its_length_keeps_all_its_text() -> None:
    """The last token is a word like any other there."""
    completion = grown(TextSpec(ID), [1, 2, 3]).completion(ended("length"))
    assert (completion.text, completion.finish_reason) == ("abc", "length")


def test_a_stop_word_takes_its_tokens_along() -> None:
    """What is not in the text is not in the tokens."""
    output = grown(TextSpec(ID, stop_words=("cd",)), [1, 2, 3, 4])
    completion = output.completion(ended("abort"))
    assert (completion.text, completion.token_ids) == ("ab", [1, 2])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "cd")


def test_times_are_those_of_the_first_and_the_last_token() -> None:
    """Time to first token and time per token come from them."""
    completion = grown(TextSpec(ID), [1, 2, 3]).completion(ended("length"))
    assert (completion.first_token_s, completion.last_token_s) == (0.0, 2.0)


def test_deltas_hold_tokens_back_that_a_stop_word_may_take() -> None:
    """A token that was sent can't be taken back."""
    spec = TextSpec(ID, stop_words=("cd",), is_streamed=True)
    output = Output(spec, letters)
    sent: list[list[int]] = []
    for token in (1, 3, 2):
        output.token_ids.append(token)
        delta = output.delta(output.extend(None))
        sent.append([] if delta is None else delta.token_ids)
    assert sent == [[1], [], [3, 2]]


def test_log_probs_come_only_where_they_were_asked_for() -> None:
    """None says "not asked", a list says what they are."""
    asked = grown(TextSpec(ID, wants_log_probs=True, num_top=1), [1])
    asked.add_log_prob(-0.5, [(1, -0.5), (2, -2.0)])
    completion = asked.completion(ended("length"))
    assert completion.log_probs == [-0.5]
    assert completion.top == [[(1, -0.5)]]
    assert grown(TextSpec(ID), [1]).completion(ended("length")).log_probs is None


def test_scores_of_a_prompt_are_put_together_over_its_chunks() -> None:
    """A long prompt is scored in several steps."""
    output = grown(TextSpec(ID, wants_log_probs=True, num_top=1), [1])
    for value in (-1.0, -2.0):
        top = TopLogProbs(2, pack_ints([3, 4]), pack_floats([-0.25, -1.5]))
        output.add_scores(ScoredChunk(ID, pack_floats([value]), top))
    completion = output.completion(ended("length"))
    assert completion.prompt_log_probs == [-1.0, -2.0]
    assert completion.prompt_top == [[(3, -0.25)], [(3, -0.25)]]


def test_of_tokens_with_one_text_the_likeliest_counts() -> None:
    """Readers index by text; the best must be found there."""
    assert by_text([(1, -0.1), (2, -0.2)], lambda _: "same") == {"same": pytest.approx(-0.1)}


def test_a_table_of_likeliest_tokens_is_cut_into_its_places() -> None:
    """It travels as columns."""
    top = TopLogProbs(2, pack_ints([1, 2, 3, 4]), Floats(pack_floats([-1.0, -2.0, -3.0, -4.0])))
    assert places_of(top, 2) == [[(1, -1.0), (2, -2.0)], [(3, -3.0), (4, -4.0)]]


def test_deltas_say_whose_they_are_and_the_last_all_that_was_recorded() -> None:
    """Several requests share an outbox, and a server tells more than why one ended."""
    spec = TextSpec(ID, is_streamed=True, wants_log_probs=True, num_top=1)
    output = grown(spec, [1])
    output.add_log_prob(-0.5, [(2, -0.25), (3, -2.0)])
    output.add_scores(ScoredChunk(ID, pack_floats([-1.0]), None))
    first = output.delta("a")
    assert first is not None
    assert (first.request_id, first.top, first.ending) == (ID, [[(2, -0.25)]], None)
    assert (first.prompt_log_probs, first.prompt_top) == ([-1.0], [[]])
    last = output.last_delta("", ended("length"))
    assert (last.prompt_log_probs, last.ending) == (None, ended("length"))


def test_a_stop_words_ending_has_what_the_scheduler_knew_at_the_start() -> None:
    """It ends the request before the scheduler hears of it, and its result is to say the same."""
    events = (("add_context", 1.0),)
    spec = TextSpec(ID, num_cached_tokens=4, events=events, policy_epoch=((0, 3),), kv_cache_epoch=((0, 2),))
    assert Output(spec, letters).stopped("cd") == Finished(
        ID, "stop", "cd", 4, events=events, policy_epoch=((0, 3),), kv_cache_epoch=((0, 2),)
    )
