"""The public result: megatron-core's fields, filled in alike whatever became of the prompt."""

import itertools
import json
from typing import Any

import pytest
import torch
from megatron.core.inference.inference_request import (
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    Status,
)

import megallm
from megallm.core_async.errors import InvalidRequestError
from megallm.core_async.intake import Entry, Intake
from megallm.core_async.messages import Completion, RequestId
from megallm.core_async.result import Result, Times, completed_result, empty_result, failed_result
from megallm.core_async.sampling_params import SamplingParams
from megallm.core_async.tokenizers import TokenizerAdapter
from tests.engines import engine_config
from tests.fakes import FakeTokenizer

ADAPTER = TokenizerAdapter(FakeTokenizer())
PARAMS = SamplingParams(temperature=0.0)


def entry_of(prompt: object) -> Entry:
    """Gives a prompt as intake leaves it."""
    ids = itertools.count(7)
    call = Intake(engine_config(), ADAPTER, lambda: RequestId(next(ids))).prepare(prompt, PARAMS)
    return call.entries[0]


def completed(
    prompt: object = "AB", *, tracks_pauses: bool = False, **changes: Any
) -> Result:  # Any: fields of several types
    """Gives the result of a prompt that got three tokens between 12 and 16 s, submitted at 10 s."""
    fields: dict[str, Any] = {
        "request_id": RequestId(7),
        "text": "CDE",
        "token_ids": [35, 36, 37],
        "finish_reason": "length",
        "stop_reason": None,
        "num_cached_tokens": 0,
        "first_token_s": 12.0,
        "last_token_s": 16.0,
        **changes,
    }
    times = Times(submitted_s=10.0, epoch_s=1_000.0, tracks_pauses=tracks_pauses)
    return completed_result(entry_of(prompt), Completion(**fields), ADAPTER, times)


def failed(prompt: object) -> Result:
    """Gives the result of a prompt that can't run."""
    entry = entry_of(prompt)
    assert entry.error is not None
    return failed_result(entry, entry.error, ADAPTER)


def event_types(result: Result) -> list[DynamicInferenceEventType]:
    """Gives the kinds of a result's events, in order."""
    return [event.type for event in result.events]


def test_a_result_is_megatrons_request() -> None:
    """Code written for megatron-core's engine takes it as it is."""
    assert issubclass(Result, DynamicInferenceRequest)
    assert megallm.Result is Result
    assert isinstance(completed(), megallm.DynamicInferenceRequest)


def test_a_completed_result_has_every_field() -> None:
    """The same in every mode: upstream leaves out other ones in each."""
    result = completed()
    assert (result.request_id, result.prompt, result.prompt_length) == (7, "AB", 2)
    assert (result.generated_tokens, result.generated_length) == ([35, 36, 37], 3)
    assert result.generated_text == "CDE"
    assert (result.status, result.succeeded(), result.failed()) == (Status.COMPLETED, True, False)
    assert (result.finish_reason, result.stop_reason) == ("length", None)
    assert (result.ttft, result.latency, result.tpot) == (2.0, 6.0, [2.0])
    assert result.sampling_params == PARAMS
    assert event_types(result) == [DynamicInferenceEventType.ADD_ENGINE, DynamicInferenceEventType.FINISH]


def test_prompt_tokens_are_an_int64_tensor_on_the_cpu() -> None:
    """Always, and the result's own."""
    prompt = [33, 34]
    result = completed(prompt)
    tokens = result.prompt_tokens
    assert tokens is not None
    assert (tokens.dtype, tokens.device.type) == (torch.int64, "cpu")
    prompt[0] = 5
    assert tokens.equal(torch.tensor([33, 34]))
    empty = failed("").prompt_tokens
    assert empty is not None
    assert (empty.dtype, tuple(empty.shape)) == (torch.int64, (0,))


def test_a_prompt_given_in_ids_has_its_text() -> None:
    """Whoever looks at a result wants to read it."""
    assert completed([33, 34]).prompt == "AB"


def test_why_it_ended_is_what_the_engine_recorded() -> None:
    """Inferred from counts, a stop at the last token of the budget would be taken for its end."""
    assert completed(finish_reason="stop", stop_reason=37).stop_reason == 37
    assert completed(finish_reason="stop", stop_reason="DE").stop_reason == "DE"
    assert completed(finish_reason="abort", first_token_s=None, last_token_s=None).finish_reason == "abort"


def test_times_that_never_were_are_none() -> None:
    """A request aborted before its first token has no such time; 0 would be a good one."""
    result = completed(token_ids=[], text="", finish_reason="abort", first_token_s=None, last_token_s=None)
    assert result.ttft is None
    assert not result.tpot
    assert (result.generated_tokens, result.generated_text) == ([], "")


def test_a_failed_result_says_what_was_wrong() -> None:
    """It is data: neighbours run on, and the caller finds value, limit and remedy in the event."""
    result = failed([1] * 200)
    assert (result.status, result.failed(), result.succeeded()) == (Status.FAILED, True, False)
    assert event_types(result) == [
        DynamicInferenceEventType.ERROR_NONTRANSIENT,
        DynamicInferenceEventType.FAIL,
    ]
    payload: Any = result.events[0].payload
    assert isinstance(payload, InvalidRequestError)
    assert "200 tokens" in str(payload)
    assert "128" in str(payload)
    assert (result.finish_reason, result.prompt_length, result.generated_length) == ("error", 200, 0)
    assert (result.generated_tokens, result.generated_text) == ([], "")


def test_ids_beyond_any_tensor_fail_like_any_other() -> None:
    """2**70 is out of every vocabulary; it must not break the call that its neighbours are in."""
    result = failed([1, 2**70])
    assert result.failed()
    assert result.prompt_length == 2


def test_an_empty_result_has_completed() -> None:
    """The prompt fills the context, or nothing was asked for: no error, and no output."""
    result = empty_result(entry_of("AB"), ADAPTER)
    assert (result.status, result.finish_reason) == (Status.COMPLETED, "length")
    assert (result.generated_tokens, result.generated_text, result.generated_length) == ([], "", 0)
    assert event_types(result) == [DynamicInferenceEventType.FINISH]


def test_events_come_in_order_with_wall_times() -> None:
    """Traces of many requests are laid side by side; tokens and pauses are there for those who ask."""
    happened = (("add_context", 11.0), ("pause", 13.0), ("evict", 14.0), ("add_context", 15.0))
    kinds = DynamicInferenceEventType
    result = completed(events=happened)
    expected = [kinds.ADD_ENGINE, kinds.ADD_CONTEXT, kinds.EVICT, kinds.ADD_CONTEXT, kinds.FINISH]
    assert event_types(result) == expected
    assert [event.timestamp for event in result.events[:-1]] == [1_010.0, 1_011.0, 1_014.0, 1_015.0]
    assert kinds.PAUSE in event_types(completed(events=happened, tracks_pauses=True))
    result = completed(events=happened, token_times=[12.0, 13.5, 16.0])
    tokens = [event for event in result.events if event.type is kinds.GENERATED_TOKEN]
    assert [event.payload for event in tokens] == [{"token_id": 35}, {"token_id": 36}, {"token_id": 37}]
    times = [event.timestamp for event in result.events[:-1]]
    assert times == [1_010.0, 1_011.0, 1_012.0, 1_013.5, 1_014.0, 1_015.0, 1_016.0]


def test_segments_are_the_texts_of_single_tokens() -> None:
    """Where they are asked for."""
    entry = entry_of("AB")
    entry.params = SamplingParams(return_segments=True)
    completion = Completion(RequestId(7), "CD", [35, 36], "length", None, 0, 1.0, 2.0)
    result: Any = completed_result(entry, completion, ADAPTER, Times(0.0, 0.0))
    assert result.segments == ["A", "B", "C", "D"]
    assert result.generated_segments == ["C", "D"]


def test_every_result_prints() -> None:
    """Upstream's raises where the prompt's tokens are missing."""
    for result in (
        completed(),
        completed([1]),
        failed(""),
        failed([500]),
        empty_result(entry_of("A"), ADAPTER),
    ):
        assert str(result).startswith("id 7, ")


def test_results_do_not_share_lists() -> None:
    """A caller that appends to one must not find it in another."""
    first, second = failed(""), failed("")
    first.generated_tokens.append(1)
    assert second.generated_tokens == []


def test_log_probs_are_none_unless_asked_for() -> None:
    """An empty list would look like a text of no tokens."""
    result = completed()
    assert result.generated_log_probs is None
    assert result.prompt_log_probs is None
    asked = completed(log_probs=[-0.1, -0.2, -0.3], prompt_log_probs=[-1.0])
    assert asked.generated_log_probs == [-0.1, -0.2, -0.3]
    assert asked.prompt_log_probs == [-1.0]


@pytest.mark.parametrize("kind", ["completed", "failed"])
def test_a_result_survives_megatrons_serialisation(kind: str) -> None:
    """RL frameworks send results between processes; a failed one too, whose error is none of megatron's."""
    result = completed(token_times=[12.0, 13.5, 16.0]) if kind == "completed" else failed([1] * 200)
    params: Any = result.sampling_params
    params.return_prompt_tokens = True
    made: Any = Result
    again: Any = made.deserialize(json.loads(json.dumps(result.serialize())))
    assert isinstance(again, Result)
    assert (again.status, again.finish_reason) == (result.status, result.finish_reason)
    assert (again.generated_tokens, again.generated_text) == (result.generated_tokens, result.generated_text)
    assert (again.request_id, again.prompt_length) == (result.request_id, result.prompt_length)
    prompt_tokens: Any = result.prompt_tokens
    assert prompt_tokens.equal(again.prompt_tokens)
    assert event_types(again) == event_types(result)
    for event, before in zip(again.events, result.events, strict=True):
        assert str(before.payload) in str(event.payload)
    assert len(result.events) == len(result.serialize()["events"]), "it is as it was"


def test_prompt_tokens_travel_only_where_they_are_asked_for() -> None:
    """As megatron-core's: they are long, and who asked has them."""
    fields = completed().serialize()
    assert fields["prompt_tokens"] is None
    assert fields["prompt_length"] == 2


def test_a_result_keeps_the_parameters_as_they_were() -> None:
    """The caller may go on to change them, their lists too."""
    params: Any = SamplingParams(temperature=0.0, stop_words=["a"])
    entry = Intake(engine_config(), ADAPTER, lambda: RequestId(7)).prepare("AB", params).entries[0]
    result: Any = empty_result(entry, ADAPTER)
    params.temperature = 1.0
    params.stop_words.append("b")
    assert (result.sampling_params.temperature, result.sampling_params.stop_words) == (0.0, ["a"])
    assert result.remaining_prompt_tokens.equal(result.prompt_tokens)
