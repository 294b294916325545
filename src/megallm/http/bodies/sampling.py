"""From a request's fields to the parameters that the engine's intake checks and resolves.

`RequestParams` has the names of `SamplingParams`, which this process need not import: it would bring
torch along.
"""

from typing import Any

from msgspec import Struct, structs

from megallm.http.bodies.schema import GenerationFields
from megallm.http.errors import RequestError
from megallm.http.service import AppSettings

SEEDS = 2**63

PARAM_OF_FIELD = {
    "choice": "structured_outputs.choice",
    "grammar": "structured_outputs.grammar",
    "json_schema": "response_format",
    "num_tokens_to_generate": "max_tokens",
    "regex": "structured_outputs.regex",
    "return_log_probs": "logprobs",
    "stop_words": "stop",
    "top_n_logprobs": "top_logprobs",
}
"""Where the request has what the intake's errors name."""


class RequestParams(Struct, kw_only=True):
    """One prompt's parameters, by the names of SamplingParams."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    num_tokens_to_generate: int | None = None
    termination_id: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_words: list[str] = []
    stop_token_ids: list[int] = []
    detokenize_stop_sequence: bool = False
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = True
    top_n_logprobs: int = 0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    json_schema: Any = None  # Any: what JSON holds
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    priority: int = 0
    cache_salt: str = ""

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar is to be compiled, which may take seconds."""
        return not (self.json_schema is self.regex is self.choice is self.grammar is None)


def request_params(
    request: GenerationFields,
    settings: AppSettings,
    *,
    max_tokens: int | None,
    num_top: int | None,
    scores_prompt: bool,
) -> RequestParams:
    """Gives the parameters of a request; a field that is absent or null has the server's default.

    `max_tokens` None: all the context holds. `num_top`: likeliest tokens to report; None: no log-probs.
    """
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    params = RequestParams(
        temperature=_given(request.temperature, settings.default_temperature),
        top_k=max(_given(request.top_k, settings.default_top_k), 0),
        top_p=_given(request.top_p, settings.default_top_p),
        min_p=request.min_p or 0.0,
        num_tokens_to_generate=max_tokens,
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        stop_words=stop,
        stop_token_ids=request.stop_token_ids or [],
        detokenize_stop_sequence=bool(request.include_stop_str_in_output),
        return_log_probs=num_top is not None,
        skip_prompt_log_probs=not scores_prompt,
        top_n_logprobs=num_top or 0,
        seed=None if request.seed is None else request.seed % SEEDS,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_given(request.repetition_penalty, 1.0),
        logit_bias=request.logit_bias,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
    )
    _add_grammar(params, request)
    return params


def for_choices(params: RequestParams, n: int) -> list[RequestParams]:
    """Gives the parameters of each of a prompt's choices: with a seed, another one for each."""
    if params.seed is None:
        return [params] * n
    seed = params.seed
    return [
        params if not place else structs.replace(params, seed=(seed + place) % SEEDS) for place in range(n)
    ]


def refused_params(error: Exception) -> RequestError:
    """Gives what an error of the intake becomes: its text begins with the field that it is about."""
    message = str(error)
    words = message.split(maxsplit=1)
    field = words[0].rstrip(":").partition("[")[0] if words else ""
    param = PARAM_OF_FIELD.get(field, field if field in RequestParams.__struct_fields__ else None)
    if param is not None and field in PARAM_OF_FIELD:
        message = f"{param}{message.removeprefix(field)}"
    return RequestError(message, param=param)


def _add_grammar(params: RequestParams, request: GenerationFields) -> None:
    """Fills in what the text has to match, from whichever of the fields says so.

    Raises: RequestError when several do.
    """
    outputs = request.structured_outputs
    wanted: dict[str, tuple[str, Any]] = {}  # Any: the same
    fields = [
        ("guided_json", "json_schema", request.guided_json),
        ("guided_regex", "regex", request.guided_regex),
        ("guided_choice", "choice", request.guided_choice),
        ("guided_grammar", "grammar", request.guided_grammar),
    ]
    if outputs is not None:
        fields += [
            ("structured_outputs.json", "json_schema", outputs.json),
            ("structured_outputs.regex", "regex", outputs.regex),
            ("structured_outputs.choice", "choice", outputs.choice),
            ("structured_outputs.grammar", "grammar", outputs.grammar),
        ]
    fields.append(("response_format", "json_schema", _format_schema(request)))
    for param, name, value in fields:
        if value is not None:
            wanted[param] = (name, value)
    if len(wanted) > 1:
        raise RequestError(
            f"{' and '.join(wanted)} are given; the text can be held to one of them", param=next(iter(wanted))
        )
    for name, value in wanted.values():
        setattr(params, name, value)


def _format_schema(request: GenerationFields) -> Any:  # Any: the same
    """Gives the schema that `response_format` asks for; True is any JSON."""
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        raise RequestError(
            "response_format.json_schema is missing; give it with a schema",
            param="response_format.json_schema",
        )
    return True if wanted.json_schema.schema is None else wanted.json_schema.schema


def _given[T](value: T | None, default: T) -> T:
    return default if value is None else value
