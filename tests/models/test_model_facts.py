"""A model's figures, counted by hand."""

import msgspec

from megallm.models.checkpoint import Experts
from megallm.models.model_facts import ModelFacts, facts_of, requests_that_fit
from tests.models.tiny_gguf import TINY, tiny_weights


def test_parameters_and_bytes_are_counted_from_the_tensors() -> None:
    """The sum over the tensors is what a load takes."""
    facts = facts_of(TINY, "bfloat16")
    assert facts.num_parameters == sum(values.size for values in tiny_weights().values())
    assert facts.weight_bytes == 2 * facts.num_parameters
    assert facts.cache_bytes_per_token == 2 * 2 * 2 * 16 * 2
    hybrid = msgspec.structs.replace(TINY, num_layers=5, layer_kinds="*--*-")
    assert facts_of(hybrid, "bfloat16").cache_bytes_per_token == facts.cache_bytes_per_token


def test_experts_that_do_not_run_are_not_active() -> None:
    """They take memory, and no time."""
    experts = Experts(num_experts=4, num_chosen=1, ffn_size=8, is_renormalised=True)
    facts = facts_of(msgspec.structs.replace(TINY, experts=experts), "float32")
    of_one = 3 * 8 * 64
    assert facts.num_parameters - facts.num_active_parameters == 3 * of_one * TINY.num_layers


def test_requests_fit_into_what_the_weights_leave() -> None:
    """None, and not a negative number, where the weights alone are too large."""
    facts = ModelFacts(num_parameters=1, num_active_parameters=1, weight_bytes=100, cache_bytes_per_token=10)
    assert requests_that_fit(facts, memory_bytes=399, context=10) == 2
    assert requests_that_fit(facts, memory_bytes=50, context=10) == 0
