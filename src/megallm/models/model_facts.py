"""What a model is and costs, from its checkpoint's header alone. Knows hyperparameters; loads nothing."""

import math
from typing import Final

from msgspec import Struct

from megallm.models.checkpoint import Hyperparameters, tensor_specs

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelFacts(Struct, frozen=True, kw_only=True):
    """Figures of one model in one dtype."""

    num_parameters: int
    num_active_parameters: int
    """Those that a token passes through: all, unless the model has experts."""
    weight_bytes: int
    cache_bytes_per_token: int
    """Keys and values of all layers."""


def facts_of(size: Hyperparameters, dtype: str) -> ModelFacts:
    """Gives the figures. `dtype` is one of `ITEM_BYTES`, of weights and cache."""
    specs = tensor_specs(size)
    num_parameters = sum(math.prod(spec.shape) for spec in specs)
    num_idle = 0
    if size.experts is not None:
        in_experts = sum(math.prod(spec.shape) for spec in specs if ".experts." in spec.name)
        num_idle = (
            in_experts // size.experts.num_experts * (size.experts.num_experts - size.experts.num_chosen)
        )
    item = ITEM_BYTES[dtype]
    return ModelFacts(
        num_parameters=num_parameters,
        num_active_parameters=num_parameters - num_idle,
        weight_bytes=num_parameters * item,
        cache_bytes_per_token=2 * size.num_attention_layers * size.num_kv_heads * size.head_dim * item,
    )


def requests_that_fit(facts: ModelFacts, *, memory_bytes: int, context: int) -> int:
    """Gives how many requests of `context` tokens have room in the cache beside the weights."""
    left = memory_bytes - facts.weight_bytes
    return max(0, left) // (facts.cache_bytes_per_token * context)
