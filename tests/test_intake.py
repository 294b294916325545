"""Prompts in: every form, every mistake, and nothing planned before all of a call is known to be right."""

import copy
import itertools
from enum import IntEnum
from typing import Any

import pytest

from megallm.core_async.config import EngineConfig
from megallm.core_async.intake import Call, Intake
from megallm.core_async.messages import NewRequest, RequestId, unpack_ints
from megallm.core_async.plan.sampling import MAX_SEED
from megallm.core_async.sampling_params import SamplingParams
from megallm.core_async.tokenizers import TokenizerAdapter
from tests.engines import engine_config
from tests.fakes import FakeTokenizer

GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=8)


class TokenizerWithBos(FakeTokenizer):
    """Has a bos, and adds none by itself."""

    bos = 5


class TokenizerOfFloats(FakeTokenizer):
    """Gives what is no token id."""

    def tokenize(self, text: str) -> Any:  # Any: it is wrong
        """Gives numbers."""
        return [float(token) for token in super().tokenize(text)]


class Letter(IntEnum):
    """Names of token ids."""

    A = 33


def with_fields(**fields: Any) -> SamplingParams:  # Any: megatron's annotations leave None out
    """Gives parameters."""
    return SamplingParams(**fields)


def new_intake(config: EngineConfig | None = None, tokenizer: FakeTokenizer | None = None) -> Intake:
    """Gives an intake that counts its requests from 1."""
    ids = itertools.count(1)
    adapter = TokenizerAdapter(tokenizer or FakeTokenizer())
    return Intake(config or engine_config(), adapter, lambda: RequestId(next(ids)))


def prepared(prompts: object, params: object = GREEDY, **options: Any) -> Call:  # Any: `prepare`'s options
    """Gives a checked call."""
    return new_intake().prepare(prompts, params, **options)


def only_request(prompts: object, params: object = GREEDY, intake: Intake | None = None) -> NewRequest:
    """Gives the one request of a call."""
    (request,) = (intake or new_intake()).prepare(prompts, params).requests
    return request


def only_error(prompts: object, params: object = GREEDY) -> str:
    """Gives what is wrong with the one prompt of a call, and checks that it is not run."""
    call = prepared(prompts, params)
    (entry,) = call.entries
    assert call.requests == []
    assert entry.error is not None
    return str(entry.error)


@pytest.mark.parametrize(
    ("prompts", "token_ids", "is_single"),
    [
        ("AB", [[33, 34]], True),
        ([33, 34], [[33, 34]], True),
        (["AB", "C"], [[33, 34], [35]], False),
        ([[33], [34, 35]], [[33], [34, 35]], False),
        ([], [], False),
    ],
)
def test_each_form_of_prompts_becomes_requests(
    prompts: object,
    token_ids: list[list[int]],
    is_single: bool,  # noqa: FBT001 - pytest passes it by name
) -> None:
    """Texts are tokenised, ids are taken as they are, and the call remembers whether one came alone."""
    call = prepared(prompts)
    assert [entry.token_ids for entry in call.entries] == token_ids
    assert [list(unpack_ints(request.prompt)) for request in call.requests] == token_ids
    assert call.is_single is is_single


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((("a", "b"), GREEDY), TypeError),
        (("a", 5), TypeError),
        (("a", [GREEDY, GREEDY]), ValueError),
        (("a", GREEDY, {"image": b""}), ValueError),
        (("a", GREEDY, [None]), TypeError),
    ],
)
def test_a_call_of_the_wrong_shape_is_refused(arguments: tuple[object, ...], error: type[Exception]) -> None:
    """Each part is looked at; the shapes themselves are another file's business."""
    with pytest.raises(error):
        new_intake().prepare(*arguments)


# ---- prompts that can't run --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty, 0 tokens; give at least 1"),
        ([[0][1:]], "prompt is empty, 0 tokens; give at least 1"),
        ([1] * 129, "prompt has 129 tokens, max_sequence_length is 128; shorten it or raise "),
        ("x" * 5_000, "prompt has 5,000 tokens, max_sequence_length is 128; shorten it or raise "),
        ([1, 97], "prompt has token id 97; the vocabulary is 0 to 96"),
        ([1, -1, 97], "prompt has token id -1; the vocabulary is 0 to 96"),
        ([2**31], "prompt has token id 2147483648; the vocabulary is 0 to 96"),
        ([0, -(2**70)], f"prompt has token id {-(2**70)}; the vocabulary is 0 to 96"),
    ],
)
def test_a_prompt_that_can_not_run_says_why(prompt: object, message: str) -> None:
    """It is data, with value, limit and remedy: the result carries it, and nothing reaches the engine."""
    assert only_error(prompt).startswith(message)


def test_the_first_and_the_last_id_of_the_vocabulary_are_taken() -> None:
    """And an `IntEnum`, which is an int."""
    assert list(unpack_ints(only_request([0, 96, Letter.A]).prompt)) == [0, 96, 33]


def test_a_tokenizer_that_gives_no_ints_is_a_type_error() -> None:
    """A fault of the tokenizer must not pass for one of the prompt."""
    with pytest.raises(TypeError):
        new_intake(tokenizer=TokenizerOfFloats()).prepare("A", GREEDY)


def test_neighbours_of_a_bad_prompt_are_requests() -> None:
    """One bad line in a batch of thousands must not cost the others."""
    call = prepared([[1], [], [2], [200], [3]])
    assert [entry.error is None for entry in call.entries] == [True, False, True, False, True]
    assert [list(unpack_ints(request.prompt)) for request in call.requests] == [[1], [2], [3]]
    assert [entry.request_id for entry in call.entries] == [1, 2, 3, 4, 5]


def test_a_total_budget_below_the_prompt_fails_that_prompt() -> None:
    """The one for output alone can't be missed this way."""
    params = with_fields(num_tokens_to_generate=None, num_tokens_total=3)
    call = prepared([[1, 2], [1, 2, 3, 4]], params)
    assert [request.max_new_tokens for request in call.requests] == [1]
    assert str(call.entries[1].error).startswith(
        "prompt has 4 tokens, num_tokens_total is 3; raise it or shorten"
    )


# ---- budgets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_length", "params", "budget"),
    [
        (10, SamplingParams(num_tokens_to_generate=8), 8),
        (10, SamplingParams(num_tokens_to_generate=1_000_000), 118),
        (10, with_fields(num_tokens_to_generate=None), 118),
        (127, SamplingParams(num_tokens_to_generate=30), 1),
        (10, with_fields(num_tokens_to_generate=None, num_tokens_total=15), 5),
        (10, with_fields(num_tokens_to_generate=None, num_tokens_total=10_000), 118),
    ],
)
def test_a_budget_is_clamped_to_the_context(prompt_length: int, params: SamplingParams, budget: int) -> None:
    """An over-long budget is how people ask for all there is; it is no mistake."""
    assert only_request([1] * prompt_length, params).max_new_tokens == budget


@pytest.mark.parametrize(
    ("prompt_length", "params"),
    [
        (128, GREEDY),
        (5, SamplingParams(num_tokens_to_generate=0)),
        (5, with_fields(num_tokens_to_generate=None, num_tokens_total=5)),
    ],
)
def test_no_room_for_output_is_nothing_to_run_and_no_error(
    prompt_length: int, params: SamplingParams
) -> None:
    """A prompt that fills the context is accepted, as upstream does; it has no output."""
    (entry,) = prepared([1] * prompt_length, params).entries
    assert (entry.request, entry.error) == (None, None)


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    """Its first token has no log-probability; a request that yields nothing would never be heard of again."""
    scoring = with_fields(num_tokens_to_generate=0, return_log_probs=True)
    call = prepared([[1], [1, 2]], scoring)
    assert [entry.request is None for entry in call.entries] == [True, False]
    assert call.requests[0].max_new_tokens == 0
    assert call.requests[0].scores_prompt


# ---- parameters --------------------------------------------------------------------------------


def test_one_set_of_parameters_serves_all_and_a_list_one_each() -> None:
    """Sweeps over parameters go as one batch."""
    call = prepared([[1], [2]], SamplingParams(temperature=0.5, num_tokens_to_generate=3))
    assert [request.sampling.temperature for request in call.requests] == [0.5, 0.5]
    each = [SamplingParams(temperature=0.1, num_tokens_to_generate=1), SamplingParams(top_k=5)]
    call = prepared([[1], [2]], each)
    assert [(request.sampling.temperature, request.sampling.top_k) for request in call.requests] == [
        (0.1, 0),
        (1.0, 5),
    ]
    assert [entry.params for entry in call.entries] == each
    assert only_request([1, 2], each[:1]).sampling.temperature == 0.1, "a list of one for one prompt"


def test_one_invalid_parameter_anywhere_stops_the_call_before_any_prompt_is_read() -> None:
    """The caller must not have to cancel what a broken call has already begun."""

    class Untouchable(FakeTokenizer):
        def tokenize(self, text: str) -> list[int]:
            raise AssertionError(f"{text!r} was tokenized")

    each = [GREEDY, GREEDY, SamplingParams(top_p=3.0)]
    with pytest.raises(ValueError, match=r"top_p is 3\.0; it must be from 0 to 1"):
        new_intake(tokenizer=Untouchable()).prepare(["A", "B", "C"], each)


def test_the_callers_objects_are_left_alone() -> None:
    """One list of prompts and one set of parameters serve many calls."""
    prompts, params = [[1, 2], [3]], SamplingParams(stop_words=["x"], stop_token_ids=[4])
    before = copy.deepcopy((prompts, params))
    call = prepared(prompts, params)
    assert (prompts, params) == before
    assert call.entries[0].params is params, "the result gives the caller's own object back"


def test_every_unseeded_request_draws_its_own_numbers_and_a_script_repeats() -> None:
    """The same prompt twice gives two samples; the same script twice gives the same ones."""
    seeds = [request.sampling.seed for request in prepared([[1]] * 100, SamplingParams()).requests]
    assert len(set(seeds)) == 100
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    again = [request.sampling.seed for request in prepared([[1]] * 100, SamplingParams()).requests]
    assert again == seeds
    chosen = prepared([[1]] * 2, SamplingParams(seed=0)).requests
    assert [request.sampling.seed for request in chosen] == [0, 0]


def test_what_a_request_asks_for_reaches_the_engine() -> None:
    """Stop words, their treatment, and how the output is wanted travel with the request."""
    params = SamplingParams(stop_words=["END"], detokenize_stop_sequence=True, stop_token_ids=[4])
    (request,) = new_intake().prepare("AB", params, is_streamed=True, reports_progress=True).requests
    assert request.stop_token_ids == (FakeTokenizer.eod, 4)
    text = request.text
    assert (text.stop_words, text.keep_stop, text.is_streamed, text.reports_progress) == (
        ("END",),
        True,
        True,
        True,
    )
    assert text.request_id == request.request_id


# ---- bos ---------------------------------------------------------------------------------------


def test_add_bos_puts_one_before_a_text_and_none_before_ids() -> None:
    """Ids are the caller's own, exactly."""
    intake = new_intake(tokenizer=TokenizerWithBos())
    params = SamplingParams(add_BOS=True)
    assert list(unpack_ints(only_request("AB", params, intake).prompt)) == [5, 33, 34]
    assert list(unpack_ints(only_request([33, 34], params, intake).prompt)) == [33, 34]
    assert list(unpack_ints(only_request("AB", GREEDY, intake).prompt)) == [33, 34]


def test_add_bos_without_one_is_refused() -> None:
    """Upstream asserts in the middle of a batch."""
    with pytest.raises(ValueError, match="add_BOS is True and the tokenizer has no bos token"):
        prepared("AB", SamplingParams(add_BOS=True))
