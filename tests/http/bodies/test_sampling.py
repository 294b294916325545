"""From a request's fields to the parameters that the intake checks."""

import pytest

from megallm.core_async.plan.sampling import resolve
from megallm.core_async.sampling_params import SamplingParams
from megallm.http.bodies.sampling import SEEDS, RequestParams, for_choices, refused_params, request_params
from megallm.http.bodies.schema import GenerationFields, JsonSchema, ResponseFormat, StructuredOutputs
from megallm.http.errors import RequestError
from megallm.http.service import AppSettings

SETTINGS = AppSettings(default_temperature=0.5, default_top_p=0.9, default_top_k=7)


def params_of(request: GenerationFields, num_top: int | None = None) -> RequestParams:
    """Gives the parameters of a request."""
    return request_params(request, SETTINGS, max_tokens=4, num_top=num_top, scores_prompt=False)


def test_the_names_are_those_of_sampling_params() -> None:
    """The intake reads them by attribute: one that it does not know would do nothing."""
    known = set(SamplingParams.__dataclass_fields__)
    assert known >= set(RequestParams.__struct_fields__)


def test_what_is_absent_has_the_servers_default() -> None:
    """And what is zero is zero."""
    params = params_of(GenerationFields())
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    params = params_of(GenerationFields(temperature=0.0, top_p=0.0, top_k=-1))
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.0, 0)


def test_all_fields_reach_the_engine() -> None:
    """A field that is taken and does nothing is a lie."""
    request = GenerationFields(
        min_p=0.1,
        seed=-1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={3: 2.5},
        stop="x",
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        min_tokens=2,
        ignore_eos=True,
        priority=3,
        cache_salt="s",
    )
    resolved = resolve(params_of(request, num_top=2), end_ids=[9], vocab_size=10)
    sampling = resolved.sampling
    assert (sampling.min_p, sampling.seed, sampling.num_top) == (0.1, SEEDS - 1, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, ((3, 2.5),))
    assert (resolved.stop_words, resolved.stop_token_ids, resolved.keep_stop) == (("x",), (4,), True)
    assert (resolved.min_new, resolved.num_new, resolved.priority, resolved.salt) == (2, 4, 3, "s")


@pytest.mark.parametrize(
    ("request_", "name", "value"),
    [
        (GenerationFields(guided_json={"a": 1}), "json_schema", {"a": 1}),
        (GenerationFields(guided_regex="a"), "regex", "a"),
        (GenerationFields(guided_choice=["a"]), "choice", ["a"]),
        (GenerationFields(guided_grammar="a"), "grammar", "a"),
        (GenerationFields(structured_outputs=StructuredOutputs(json=True)), "json_schema", True),
        (GenerationFields(structured_outputs=StructuredOutputs(regex="a")), "regex", "a"),
        (GenerationFields(response_format=ResponseFormat(type="text")), "json_schema", None),
        (
            GenerationFields(response_format=ResponseFormat(type="json_object")),
            "json_schema",
            {"type": "object"},
        ),
        (
            GenerationFields(
                response_format=ResponseFormat(type="json_schema", json_schema=JsonSchema(schema={"a": 1}))
            ),
            "json_schema",
            {"a": 1},
        ),
    ],
)
def test_a_format_is_one_of_the_engines(request_: GenerationFields, name: str, value: object) -> None:
    """Peers have three ways to ask for it."""
    params = params_of(request_)
    assert getattr(params, name) == value
    assert params.has_grammar == (value is not None)


def test_two_formats_are_refused() -> None:
    """An output can be held to one."""
    with pytest.raises(RequestError, match=r"guided_regex and response_format"):
        params_of(GenerationFields(guided_regex="a", response_format=ResponseFormat(type="json_object")))
    with pytest.raises(RequestError) as caught:
        params_of(GenerationFields(response_format=ResponseFormat(type="json_schema")))
    assert caught.value.param == "response_format.json_schema"


def test_choices_of_a_seeded_prompt_have_seeds_in_a_row() -> None:
    """The same one would make the same text `n` times."""
    assert [each.seed for each in for_choices(RequestParams(seed=SEEDS - 1), 3)] == [SEEDS - 1, 0, 1]
    unseeded = RequestParams()
    assert all(each is unseeded for each in for_choices(unseeded, 3))


@pytest.mark.parametrize(
    ("message", "param", "told"),
    [
        ("stop_words holds an empty string", "stop", "stop holds an empty string"),
        ("logit_bias[5] is 101", "logit_bias", "logit_bias[5] is 101"),
        ("json_schema: too deep", "response_format", "response_format: too deep"),
        ("min_tokens is 5", "min_tokens", "min_tokens is 5"),
        ("something else", None, "something else"),
        ("", None, ""),
    ],
)
def test_an_error_of_the_intake_names_the_requests_field(message: str, param: str | None, told: str) -> None:
    """The caller does not know our names."""
    error = refused_params(ValueError(message))
    assert (error.param, str(error)) == (param, told)
