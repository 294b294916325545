"""Checks SamplingParams and resolves them to the numbers that the engine runs on.

Reads the public object by attribute: megatron-core's own class lacks our fields, and other
versions may lack some of theirs.
"""

from collections.abc import Sequence
from math import inf
from typing import Protocol, cast

from msgspec import Struct

from megallm.core_async.messages import Sampling
from megallm.core_async.plan.prompts import items_of
from megallm.core_async.structured import grammar_of

MAX_SEED = 2**63 - 1
MAX_PRIORITY = 1_000_000
"""Of either sign."""
LEAST_FLOAT, MOST_FLOAT = 2.0**-126, 2.0**127
"""What a device still tells from 0, which would be off, and from infinity."""
_MISSING = object()


class ParamsFields(Protocol):
    """The fields that megatron-core's SamplingParams has in every version."""

    temperature: float
    top_k: int
    top_p: float
    num_tokens_to_generate: int | None
    termination_id: int | None


class Resolved(Struct, frozen=True, gc=False):
    """One SamplingParams, checked, with every default filled in."""

    sampling: Sampling
    """With seed 0 where `has_seed` is false: the engine puts one of its own."""
    has_seed: bool
    num_new: int | None
    """Output tokens asked for; None: all the context holds."""
    num_total: int | None
    """Prompt and output together; None: not limited this way."""
    min_new: int
    stop_token_ids: tuple[int, ...]
    stop_words: tuple[str, ...]
    keep_stop: bool
    add_bos: bool
    scores_prompt: bool
    priority: int
    salt: str


def resolve(params: ParamsFields, *, end_ids: Sequence[int], vocab_size: int) -> Resolved:
    """Checks every field and fills in the defaults; `params` is not changed.

    `end_ids`: what ends an answer unless `params` names a termination id.
    Raises: TypeError and ValueError naming field, value and range.
    """
    num_new = _optional_integer(params, "num_tokens_to_generate", 0, None)
    num_total = _optional_integer(params, "num_tokens_total", 1, None)
    if num_new is not None and num_total is not None:
        raise ValueError(
            f"num_tokens_to_generate is {num_new} and num_tokens_total is {num_total}; give one of the two"
        )
    wants_log_probs = _boolean(params, "return_log_probs")
    min_new = _integer(params, "min_tokens", 0, num_new, 0)
    stop_token_ids = _stop_token_ids(params, end_ids, vocab_size)
    if min_new and len(stop_token_ids) >= vocab_size:
        raise ValueError(
            f"min_tokens is {min_new} and stop_token_ids is the whole vocabulary, so that no token could come"
            " first; leave one of the two out"
        )
    return Resolved(
        sampling=_sampling(params, vocab_size, wants_log_probs=wants_log_probs),
        has_seed=getattr(params, "seed", None) is not None,
        num_new=num_new,
        num_total=num_total,
        min_new=min_new,
        stop_token_ids=stop_token_ids,
        stop_words=_stop_words(params),
        keep_stop=_boolean(params, "detokenize_stop_sequence"),
        add_bos=_boolean(params, "add_BOS"),
        scores_prompt=wants_log_probs and not _boolean(params, "skip_prompt_log_probs"),
        priority=_integer(params, "priority", -MAX_PRIORITY, MAX_PRIORITY, 0),
        salt=_string(params, "cache_salt"),
    )


def _sampling(params: ParamsFields, vocab_size: int, *, wants_log_probs: bool) -> Sampling:
    num_top = _integer(params, "top_n_logprobs", 0, vocab_size, 0)
    if num_top and not wants_log_probs:
        raise ValueError(f"top_n_logprobs is {num_top} and return_log_probs is False; set it to True")
    top_p = _number(params, "top_p", 0.0, 1.0, 0.0)
    return Sampling(
        temperature=min(_number(params, "temperature", 0.0, None, 1.0), MOST_FLOAT),
        top_k=min(_integer(params, "top_k", 0, None, 0), vocab_size),
        top_p=max(top_p, LEAST_FLOAT) if top_p else 0.0,
        min_p=_number(params, "min_p", 0.0, 1.0, 0.0),
        seed=_optional_integer(params, "seed", 0, MAX_SEED) or 0,
        wants_log_probs=wants_log_probs,
        num_top=num_top,
        presence_penalty=_number(params, "presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=_number(params, "frequency_penalty", -2.0, 2.0, 0.0),
        repetition_penalty=_number(params, "repetition_penalty", 0.001, 1000.0, 1.0),
        logit_bias=_logit_bias(params, vocab_size),
        grammar=grammar_of(params),
    )


def _logit_bias(params: object, vocab_size: int) -> tuple[tuple[int, float], ...]:
    bias: object = getattr(params, "logit_bias", None)
    if bias is None:
        return ()
    if not isinstance(bias, dict):
        raise TypeError(f"logit_bias is a {type(bias).__name__}; give a dict of token id to number")
    pairs = cast("dict[object, object]", bias).items()  # cast: isinstance says no more
    return tuple(
        (
            _checked_integer("logit_bias", token, 0, vocab_size - 1),
            _checked_number(f"logit_bias[{token}]", value, -100.0, 100.0),
        )
        for token, value in pairs
    )


def _stop_token_ids(params: object, end_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    ids: list[int] = []
    termination_id = _optional_integer(params, "termination_id", -1, vocab_size - 1)
    if termination_id is None and not _boolean(params, "ignore_eos"):
        ids += end_ids
    elif termination_id is not None and termination_id >= 0:
        ids.append(termination_id)
    more: object = getattr(params, "stop_token_ids", None)
    if more is not None:
        tokens = items_of(more)
        if tokens is None:
            raise TypeError(f"stop_token_ids is a {type(more).__name__}; give a list of token ids")
        ids += [_checked_integer("stop_token_ids", token, 0, vocab_size - 1) for token in tokens]
    return tuple(dict.fromkeys(ids))


def _stop_words(params: object) -> tuple[str, ...]:
    given: object = getattr(params, "stop_words", None)
    if given is None:
        return ()
    words = items_of(given)
    if words is None:
        raise TypeError(f"stop_words is a {type(given).__name__}; give a list of strings")
    checked: dict[str, None] = {}
    for word in words:
        if not isinstance(word, str):
            raise TypeError(f"stop_words holds a {type(word).__name__}, {word!r}; give strings")
        if not word:
            raise ValueError("stop_words holds an empty string; leave it out")
        checked[word] = None
    return tuple(checked)


def _boolean(params: object, field: str) -> bool:
    value = getattr(params, field, False)
    if not isinstance(value, bool):
        raise TypeError(f"{field} is {value!r}; it must be True or False")
    return value


def _string(params: object, field: str) -> str:
    value = getattr(params, field, "")
    if not isinstance(value, str):
        raise TypeError(f"{field} is {value!r}; it must be a string")
    return value


def _number(params: object, field: str, least: float, most: float | None, default: float) -> float:
    value = getattr(params, field, _MISSING)
    return default if value is _MISSING else _checked_number(field, value, least, most)


def _checked_number(field: str, value: object, least: float, most: float | None) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{field} is {value!r}; it must be a number{_range(least, most)}")
    if not least <= value <= (inf if most is None else most) or value == inf:
        raise ValueError(f"{field} is {value!r}; it must be{_range(least, most)}")
    return float(value)


def _integer(params: object, field: str, least: int, most: int | None, default: int) -> int:
    value = getattr(params, field, _MISSING)
    return default if value is _MISSING else _checked_integer(field, value, least, most)


def _optional_integer(params: object, field: str, least: int, most: int | None) -> int | None:
    value = getattr(params, field, None)
    return None if value is None else _checked_integer(field, value, least, most)


def _checked_integer(field: str, value: object, least: int, most: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{field} is {value!r}; it must be an integer{_range(least, most)}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{field} is {value}; it must be{_range(least, most)}")
    return value


def _range(least: float, most: float | None) -> str:
    return f" at least {least:g}" if most is None else f" from {least:g} to {most:,}"
