"""Which megatron-core models are taken at all: options that the engine does not run are refused, by name.

Reads the model and its config by attribute; imports no megatron.
"""

from typing import Any

import torch
from torch import nn

from megallm.core_async.errors import UnsupportedModelError

type MegatronModule = Any  # megatron's modules are untyped, and their attributes are what this file reads

SUPPORTED = (
    "supported are GPTModel and HybridModel of TransformerLayers whose attention is SelfAttention, "
    "MLASelfAttention or none, causal, and whose MLP is dense or a mixture of experts"
)


def unwrapped(model: nn.Module) -> MegatronModule:
    """Gives the model inside wrappers such as Float16Module and DistributedDataParallel."""
    inner: MegatronModule = model
    while not hasattr(inner, "decoder") and hasattr(inner, "module"):
        inner = inner.module
    if not all(hasattr(inner, part) for part in ("decoder", "config", "vocab_size")):
        raise UnsupportedModelError(f"{type(model).__name__} has no decoder; {SUPPORTED}")
    return inner


def device_of(model: nn.Module) -> torch.device:
    """Gives the device of the model's parameters; a stage of a pipeline may have none."""
    parameter = next(model.parameters(), None)
    if parameter is not None:
        return parameter.device
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def refuse_options(model: MegatronModule) -> None:
    """Raises UnsupportedModelError, naming the first option that is not run, and the remedy."""
    config = model.config
    has_tp = config.tensor_model_parallel_size > 1
    refused = {
        "a chunk of a virtual pipeline": (
            (config.virtual_pipeline_model_parallel_size or 1) > 1,
            "build it with virtual_pipeline_model_parallel_size=None: one part of the model a rank",
        ),
        "context_parallel_size > 1": (
            config.context_parallel_size > 1,
            "build it with context_parallel_size=1",
        ),
        # both split tokens whatever the layers' own switches say
        "sequence_parallel and tp_comm_overlap": (
            config.sequence_parallel and has_tp and config.tp_comm_overlap,
            "build it with tp_comm_overlap=False",
        ),
        "sequence_parallel and transformer_impl='inference_optimized'": (
            config.sequence_parallel and has_tp and config.transformer_impl == "inference_optimized",
            "build it with transformer_impl='transformer_engine' or 'local'",
        ),
        "multi-token prediction layers": (bool(config.mtp_num_layers), "build it with mtp_num_layers=None"),
        "multimodal rotary positions": (model.position_embedding_type == "mrope", SUPPORTED),
        "cache_mla_latents": (
            getattr(config, "cache_mla_latents", False),
            "build it with cache_mla_latents=False: keys and values are cached expanded",
        ),
    }
    for option, (is_set, remedy) in refused.items():
        if is_set:
            raise UnsupportedModelError(
                f"the model is or has {option}, which the engine does not run; {remedy}"
            )
