"""What SamplingParams come to, and how a wrong one is refused."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams

from megallm.core_async.plan.sampling import MAX_SEED, Resolved, resolve
from megallm.core_async.sampling_params import SamplingParams

EOD = 9


def resolved(**fields: Any) -> Resolved:  # Any: fields of many types, wrong ones among them
    """Gives what parameters come to under a vocabulary of 100 ids that ends documents with 9."""
    return resolved_from(SamplingParams(**fields))


def resolved_from(
    params: Any, end_ids: tuple[int, ...] = (EOD,)
) -> Resolved:  # Any: megatron's class, or ours
    """Gives what a given object comes to."""
    return resolve(params, end_ids=end_ids, vocab_size=100)


def test_defaults_are_megatrons() -> None:
    """Swapping the import must not change what a script generates."""
    got = resolved()
    sampling = got.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 0.0, 0.0)
    assert (got.num_new, got.num_total, got.has_seed) == (
        MegatronSamplingParams().num_tokens_to_generate,
        None,
        False,
    )
    assert (got.stop_token_ids, got.stop_words) == ((EOD,), ())
    assert not got.keep_stop
    assert not got.add_bos


def test_megatrons_own_object_gives_the_same() -> None:
    """Existing code builds megatron-core's class; ours must not be needed anywhere."""
    fields: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "num_tokens_to_generate": 5}
    plain = resolved_from(MegatronSamplingParams(**fields))
    assert plain == resolved(**fields)


def test_top_k_and_top_p_work_together() -> None:
    """Upstream's default backend asserts against it inside the step, which kills the engine."""
    sampling = resolved(top_k=40, top_p=0.9).sampling
    assert (sampling.top_k, sampling.top_p) == (40, 0.9)


def test_whole_numbers_pass_for_fractions() -> None:
    """`temperature=0` is how everyone writes greedy."""
    sampling = resolved(temperature=0, top_p=1, min_p=0).sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)
    assert isinstance(sampling.temperature, float)


@pytest.mark.parametrize(
    ("field", "value", "bounds"),
    [
        ("temperature", -0.1, "at least 0"),
        ("temperature", float("nan"), "at least 0"),
        ("temperature", float("inf"), "at least 0"),
        ("top_k", -1, "at least 0"),
        ("top_p", -0.5, "from 0 to 1"),
        ("top_p", 1.5, "from 0 to 1"),
        ("top_p", float("nan"), "from 0 to 1"),
        ("min_p", 2.0, "from 0 to 1"),
        ("min_p", -1.0, "from 0 to 1"),
        ("seed", -1, "from 0 to 9,223,372,036,854,775,807"),
        ("seed", MAX_SEED + 1, "from 0 to 9,223,372,036,854,775,807"),
        ("num_tokens_to_generate", -1, "at least 0"),
        ("num_tokens_total", 0, "at least 1"),
        ("termination_id", -2, "from -1 to 99"),
        ("termination_id", 100, "from -1 to 99"),
        ("presence_penalty", -2.5, "from -2 to 2"),
        ("frequency_penalty", 2.5, "from -2 to 2"),
        ("repetition_penalty", 0.0, "from 0.001 to 1,000"),
        ("repetition_penalty", 1e-40, "from 0.001 to 1,000"),
        ("min_tokens", -1, "at least 0"),
        ("top_n_logprobs", 101, "from 0 to 100"),
    ],
)
def test_a_value_out_of_range_is_a_value_error_with_field_value_and_range(
    field: str, value: float, bounds: str
) -> None:
    """Inside the step it would end every request of the batch; here it ends one call, and says why."""
    with pytest.raises(ValueError, match=rf"{field} is {value}; it must be {bounds}"):
        resolved(**{field: value})


@pytest.mark.parametrize("token", [-1, 100])
def test_a_stop_token_id_outside_the_vocabulary_is_refused(token: int) -> None:
    """It could never come, so the caller has mistaken something."""
    with pytest.raises(ValueError, match=rf"stop_token_ids is {token}; it must be from 0 to 99"):
        resolved(stop_token_ids=[5, token])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", "0.9"),
        ("seed", 1.0),
        ("num_tokens_to_generate", 8.0),
        ("num_tokens_total", "all"),
        ("termination_id", "</s>"),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [5.0]),
        ("stop_words", "END"),
        ("stop_words", ["END", 5]),
        ("add_BOS", "yes"),
        ("detokenize_stop_sequence", 1),
        ("ignore_eos", None),
        ("logit_bias", [(5, 1.0)]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "much"}),
        ("return_log_probs", 1),
        ("cache_salt", 5),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_field(field: str, value: object) -> None:
    """A string of stop words would be taken letter by letter, a bool for a number: nobody means that."""
    with pytest.raises(TypeError, match=field):
        resolved(**{field: value})


def test_more_tokens_than_the_budget_can_not_be_the_least() -> None:
    """One of the two would be broken silently."""
    with pytest.raises(ValueError, match="min_tokens is 6; it must be from 0 to 5"):
        resolved(num_tokens_to_generate=5, min_tokens=6)


def test_a_first_token_there_must_be() -> None:
    """With every id a stop id and none of them allowed, the device would have nothing to choose from."""
    with pytest.raises(ValueError, match="min_tokens is 1 and stop_token_ids is the whole vocabulary"):
        resolved(min_tokens=1, stop_token_ids=list(range(100)))
    assert len(resolved(stop_token_ids=list(range(100))).stop_token_ids) == 100


@pytest.mark.parametrize("bias", [{100: 1.0}, {-1: 1.0}, {5: 100.5}, {5: float("nan")}])
def test_a_bias_outside_the_vocabulary_or_its_range_is_refused(bias: dict[int, float]) -> None:
    """The id could never come, or nothing else could."""
    with pytest.raises(ValueError, match="logit_bias"):
        resolved(logit_bias=bias)


def test_rivals_are_reported_beside_log_probs_alone() -> None:
    """As upstream, where it fails later."""
    with pytest.raises(ValueError, match="top_n_logprobs is 3 and return_log_probs is False"):
        resolved(top_n_logprobs=3)
    assert resolved(top_n_logprobs=3, return_log_probs=True).sampling.num_top == 3


def test_values_that_a_device_can_not_hold_mean_the_same_there() -> None:
    """A top_k beyond int32 is off like any beyond the vocabulary; a tiny top_p leaves the best token."""
    assert resolved(top_k=2**70).sampling.top_k == 100
    assert resolved(top_p=1e-300).sampling.top_p > 0
    assert resolved(temperature=1e300).sampling.temperature < 3e38


def test_an_empty_stop_word_is_refused() -> None:
    """It is found in any text at once, so nothing would ever be generated."""
    with pytest.raises(ValueError, match="stop_words holds an empty string"):
        resolved(stop_words=["END", ""])


def test_a_budget_for_output_and_one_for_all_exclude_each_other() -> None:
    """Either could be meant; upstream asserts."""
    with pytest.raises(
        ValueError, match=r"num_tokens_to_generate is 5 and num_tokens_total is 50; give one of the two"
    ):
        resolved(num_tokens_to_generate=5, num_tokens_total=50)


def test_a_total_budget_is_kept_beside_an_unlimited_output() -> None:
    """Megatron counts prompt and output together under this name."""
    got = resolved(num_tokens_to_generate=None, num_tokens_total=50)
    assert (got.num_new, got.num_total) == (None, 50)


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({}, (EOD,)),
        ({"termination_id": 4}, (4,)),
        ({"termination_id": -1}, ()),
        ({"ignore_eos": True}, ()),
        ({"ignore_eos": True, "stop_token_ids": [3]}, (3,)),
        ({"stop_token_ids": [3, 4, 3]}, (EOD, 3, 4)),
        ({"stop_token_ids": [4], "termination_id": 4}, (4,)),
    ],
)
def test_what_ends_the_output(fields: dict[str, Any], ids: tuple[int, ...]) -> None:
    """Megatron's termination id, the tokenizer's end, none at all, and more of them: each id once."""
    assert resolved(**fields).stop_token_ids == ids


def test_a_tokenizer_without_an_end_never_ends() -> None:
    """The budget ends the output then."""
    assert resolved_from(SamplingParams(), end_ids=()).stop_token_ids == ()


def test_stop_words_come_once_each_in_order() -> None:
    """The automaton's size is theirs."""
    assert resolved(stop_words=["b", "a", "b"]).stop_words == ("b", "a")


@pytest.mark.parametrize(("seed", "has_seed"), [(None, False), (0, True), (7, True), (MAX_SEED, True)])
def test_zero_is_a_seed_and_none_is_not(seed: int | None, has_seed: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """`seed=0` has to repeat like any other."""
    got = resolved(seed=seed)
    assert (got.has_seed, got.sampling.seed) == (has_seed, seed or 0)


def test_the_callers_object_is_left_alone() -> None:
    """One object is used for many calls, from several threads."""
    params = SamplingParams(stop_words=["b", "b"], stop_token_ids=[3, 3], seed=5)
    before = copy.deepcopy(params)
    resolved_from(params)
    assert params == before


@given(field=st.sampled_from(["temperature", "top_p", "min_p"]), value=st.floats())
def test_any_float_is_either_taken_as_it_is_or_refused(field: str, value: float) -> None:
    """NaN passes most comparisons unseen; nothing but a usable number may reach the device."""
    is_usable = 0 <= value < float("inf") and (field == "temperature" or value <= 1)
    if is_usable:
        got = getattr(resolved(**{field: value}).sampling, field)
        assert got == pytest.approx(min(value, 2.0**127), abs=2.0**-126)
    else:
        with pytest.raises(ValueError, match=f"^{field} is "):
            resolved(**{field: value})
