"""The public result: megatron-core's DynamicInferenceRequest, filled in alike in every mode."""

import copy
from array import array
from dataclasses import dataclass
from typing import Any, override

import torch
from megatron.core.inference.inference_request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    Status,
)
from msgspec import Struct

from megallm.core_async.errors import InvalidRequestError, MegaLLMError, RequestFailedError
from megallm.core_async.intake import Entry
from megallm.core_async.messages import Completion
from megallm.core_async.plan.output import Place, by_text
from megallm.core_async.tokenizers import TokenizerAdapter


@dataclass(kw_only=True)
class Result(DynamicInferenceRequest):
    """What one prompt gave: megatron-core's fields, and why it ended.

    `prompt_tokens` is a CPU int64 tensor `[prompt_length]` of its own. Times are in seconds:
    `ttft` and `latency` from the submission, `tpot` a list of one mean per output token after the
    first (empty for fewer than two tokens).
    """

    finish_reason: str | None = None
    """"stop", "length", "abort" or "error", as the engine recorded it."""
    stop_reason: int | str | None = None
    """The token id or the stop word that ended it."""
    num_evictions: int = 0
    """How often its blocks were taken away, and its tokens computed again."""

    @override
    def serialize(self) -> dict[str, Any]:
        """Gives a dict for JSON or msgpack, from which `deserialize` makes a result again.

        As megatron-core's: without `prompt_tokens` unless `return_prompt_tokens` is set, and an error is
        one of its context errors afterwards.
        """
        events, self.events = self.events, []
        try:
            base: Any = super()  # Any: megatron says no more than dict
            fields: dict[str, Any] = base.serialize()
        finally:
            self.events = events
        return {**fields, "events": [_serialized(event, self.request_id) for event in events]}

    def __post_init__(self) -> None:
        """Takes a copy of the parameters: megatron-core's deep copy costs more than all else of a result."""
        given, self.sampling_params = self.sampling_params, None
        super().__post_init__()
        self.sampling_params = _copied(given)


def _copied(params: Any) -> Any:
    """Gives a copy of parameters, and of their lists and dicts. Any: megatron-core's class, ours, or None."""
    copied = copy.copy(params)
    fields: dict[str, Any] = getattr(copied, "__dict__", {})  # a dict, before `deserialize`
    for name, value in list(fields.items()):
        if isinstance(value, list | dict):
            setattr(copied, name, copy.copy(value))  # pyright: ignore[reportUnknownArgumentType] - of any items
    return copied


def failed_result(entry: Entry, error: InvalidRequestError, tokenizer: TokenizerAdapter) -> Result:
    """Gives the result of a prompt that could not run; its last events say why."""
    result = _result(entry, tokenizer)
    result.finish_reason = "error"
    _add_failure(result, error)
    return result


def empty_result(entry: Entry, tokenizer: TokenizerAdapter) -> Result:
    """Gives the result of a prompt that leaves no room for output, or asked for none."""
    result = _result(entry, tokenizer)
    result.status = Status.COMPLETED
    result.finish_reason = "length"
    result.latency = 0.0
    if entry.params.return_log_probs:
        lists: Any = result  # Any: megatron declares tensors here and gives lists
        lists.generated_log_probs, lists.prompt_log_probs = [], []
    result.add_event_finish()
    return result


class Times(Struct, frozen=True):
    """When a call was submitted, and what its results' events are reckoned from."""

    submitted_s: float
    """Loop time of the submission."""
    epoch_s: float
    """Wall time, in seconds since 1970, of loop time 0."""
    tracks_pauses: bool = False


def draft_result(entry: Entry, tokenizer: TokenizerAdapter) -> Result:
    """Gives what is known of a result before its prompt has run: all that comes from the prompt."""
    return _result(entry, tokenizer)


def completes_quickly(entry: Entry, completion: Completion) -> bool:
    """Whether what `completed_result` adds to a draft takes microseconds: nothing for each token."""
    wants_segments = getattr(entry.params, "return_segments", False)
    return completion.log_probs is None and completion.token_times is None and not wants_segments


def completed_result(
    entry: Entry,
    completion: Completion,
    tokenizer: TokenizerAdapter,
    times: Times,
    draft: Result | None = None,
) -> Result:
    """Gives the result of a prompt that ran; `draft`, where there is one, filled in."""
    result = _result(entry, tokenizer) if draft is None else draft
    result.status = Status.COMPLETED
    result.generated_tokens = completion.token_ids
    result.generated_length = len(completion.token_ids)
    result.generated_text = completion.text
    result.finish_reason = completion.finish_reason
    result.stop_reason = completion.stop_reason
    result.num_cached_tokens = completion.num_cached_tokens
    result.num_evictions = completion.num_preemptions
    result.policy_epoch = _marks(completion.policy_epoch)
    result.kv_cache_epoch = _marks(completion.kv_cache_epoch)
    failure = RequestFailedError(str(completion.stop_reason)) if completion.finish_reason == "error" else None
    try:
        _add_log_probs(result, completion, tokenizer)
        _add_segments(result, entry.token_ids, tokenizer)
    except RequestFailedError as error:
        failure = failure or error
    first_s, last_s = completion.first_token_s, completion.last_token_s
    if first_s is not None and last_s is not None:
        result.ttft = first_s - times.submitted_s
        result.latency = last_s - times.submitted_s
        if result.generated_length > 1:
            result.tpot = [(last_s - first_s) / (result.generated_length - 1)]
    _add_events(result, completion, times)
    if failure is None:
        result.add_event_finish()
    else:
        result.finish_reason, result.stop_reason = "error", str(failure)
        _add_failure(result, failure)
    return result


def _add_failure(result: Result, error: InvalidRequestError | RequestFailedError) -> None:
    result.status = Status.FAILED
    result.add_event_error_nontransient(error)
    result.add_event_fail()


def _add_events(result: Result, completion: Completion, times: Times) -> None:
    """Fills in megatron-core's events, in order of time."""
    kinds = DynamicInferenceEventType
    happened: list[tuple[float, DynamicInferenceEventType, object]] = [
        (times.submitted_s, kinds.ADD_ENGINE, None)
    ]
    for what, time_s in completion.events:
        if what != "pause" or times.tracks_pauses:
            happened.append((time_s, kinds[what.upper()], None))
    tokens = zip(completion.token_times or (), completion.token_ids, strict=False)
    happened += [(time_s, kinds.GENERATED_TOKEN, {"token_id": token}) for time_s, token in tokens]
    happened.sort(key=lambda event: event[0])
    result.events = [
        DynamicInferenceEvent(timestamp=times.epoch_s + time_s, type=kind, payload=payload)
        for time_s, kind, payload in happened
    ]
    result.event_add_engine = result.events[0]


def _add_segments(result: Result, prompt: list[int], tokenizer: TokenizerAdapter) -> None:
    """Fills in the tokens' texts one by one, where `return_segments` asks for them."""
    if not getattr(result.sampling_params, "return_segments", False):
        return
    result.generated_segments = [tokenizer.detokenize([token]) for token in result.generated_tokens]
    result.segments = [tokenizer.detokenize([token]) for token in prompt] + result.generated_segments


def _add_log_probs(result: Result, completion: Completion, tokenizer: TokenizerAdapter) -> None:
    """Fills in log-probs; they stay None where nobody asked, and are empty for a prompt skipped."""
    if completion.log_probs is None:
        return
    lists: Any = result  # Any: megatron declares tensors here and gives lists
    lists.generated_log_probs = completion.log_probs
    lists.prompt_log_probs = completion.prompt_log_probs
    if getattr(result.sampling_params, "top_n_logprobs", 0) > 0:
        result.generated_top_n_logprobs = _by_text(completion.top, tokenizer)
        result.prompt_top_n_logprobs = _by_text(completion.prompt_top, tokenizer)


def _by_text(places: list[Place] | None, tokenizer: TokenizerAdapter) -> list[dict[str, float]]:
    return [by_text(place, tokenizer.detokenize) for place in places or []]


def _serialized(event: DynamicInferenceEvent, request_id: int) -> dict[str, Any]:
    """Gives an event as megatron-core reads it, which knows errors of its own alone."""
    payload: object = event.payload
    if isinstance(payload, MegaLLMError):
        payload = {
            "type": "ContextOverflowError",
            "request_id": request_id,
            "message": str(payload),
            "is_transient": False,
        }
    return {"timestamp": event.timestamp, "type": event.type.name, "payload": payload}


def _marks(epochs: tuple[tuple[int, int], ...] | None) -> list[tuple[int, int]] | None:
    return None if epochs is None else list(epochs)


def _result(entry: Entry, tokenizer: TokenizerAdapter) -> Result:
    prompt: Any = entry.prompt
    token_ids = entry.token_ids
    if entry.error is not None:
        bounds = torch.iinfo(torch.int64)
        token_ids = [min(max(token, bounds.min), bounds.max) for token in token_ids]  # may not fit
    if not isinstance(prompt, str):
        prompt = _text_of(token_ids, tokenizer) if entry.error is None else None
    return Result(
        request_id=entry.request_id,
        prompt=prompt,
        prompt_tokens=_tensor_of(token_ids),
        prompt_length=len(token_ids),
        sampling_params=entry.params,
        generated_tokens=[],
        generated_length=0,
        generated_text="",
    )


def _tensor_of(token_ids: list[int]) -> torch.Tensor:
    """Gives ids as a tensor of their own, in a third of the time that `torch.tensor` takes."""
    if not token_ids:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(array("q", token_ids), dtype=torch.int64)


def _text_of(token_ids: list[int], tokenizer: TokenizerAdapter) -> str | None:
    """Gives a prompt's text, which came as ids; None where the tokenizer has none for them."""
    try:
        return tokenizer.detokenize(token_ids)
    except RequestFailedError:
        return None
