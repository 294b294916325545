"""The public SamplingParams are megatron-core's, with more fields."""

import copy
import dataclasses
from typing import Any

from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams

import megallm
from megallm.core_async.sampling_params import SamplingParams


def test_it_is_megatrons_class_with_more_fields() -> None:
    """Code that checks for, builds or copies megatron's class goes on working."""
    assert issubclass(SamplingParams, MegatronSamplingParams)
    assert megallm.SamplingParams is SamplingParams
    inherited = {field.name for field in dataclasses.fields(MegatronSamplingParams)}
    own = {field.name for field in dataclasses.fields(SamplingParams)} - inherited
    assert own >= {"min_p", "seed", "stop_token_ids", "ignore_eos"}


def test_megatrons_fields_keep_their_defaults() -> None:
    """Swapping the import must not change what a script generates."""
    plain = MegatronSamplingParams()
    ours = SamplingParams()
    assert {field.name: getattr(ours, field.name) for field in dataclasses.fields(plain)} == {
        field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)
    }


def test_our_fields_are_off_by_default() -> None:
    """A caller who has never heard of them is not affected."""
    params = SamplingParams()
    assert (params.min_p, params.seed, params.stop_token_ids, params.ignore_eos) == (0.0, None, None, False)


def test_it_compares_and_copies_as_a_value() -> None:
    """Frameworks deduplicate and copy them."""
    params = SamplingParams(temperature=0.0, seed=3, stop_token_ids=[4])
    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params, seed=4) != params


def test_it_survives_megatrons_serialisation() -> None:
    """Megatron's own results carry their parameters through `serialize` and back."""
    params = SamplingParams(temperature=0.0, top_k=3, seed=3, min_p=0.1)
    untyped: Any = params  # Any: megatron's annotation is a bare dict
    assert SamplingParams(**untyped.serialize()) == params
