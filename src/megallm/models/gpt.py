"""A checkpoint as a megatron-core model: GPTModel, or HybridModel of attention and MLP layers.

Knows how the two classes are built on a device and filled; knows no file format.
"""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from contextlib import nullcontext
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megallm.core_async.device.swaps import Swaps
from megallm.core_async.errors import UnsupportedModelError
from megallm.models.checkpoint import Checkpoint, Hyperparameters
from megallm.models.extra_parts import add_parts
from megallm.models.loading_bar import loading_bar
from megallm.models.megatron_config import gpt_spec, hybrid_pattern, hybrid_spec, transformer_config
from megallm.models.placements import LayerNames, fill
from megallm.models.rotary import inverse_frequencies

type ModelClass = Literal["gpt", "hybrid"]

_NAMES = {
    "gpt": LayerNames(),
    "hybrid": LayerNames("decoder.layers.{1}.", "decoder.layers.{1}.", "decoder.final_norm.weight"),
}
_RANDOM_DEVIATION = 0.02
"""Of random weights: what models are initialised with."""


def build_gpt(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    model_class: ModelClass = "gpt",
    progress: bool | None = False,
) -> Any:  # Any: GPTModel or HybridModel, which are untyped
    """Builds the model on `device`, in eval mode, its parameters frozen, `dtype` and filled.

    Host memory peaks at the model (on a CPU) plus one tensor as it is stored: tensors are read and
    copied one by one. `progress`: a bar on stderr; None is on a terminal. Needs megatron's parallel state.

    Raises: UnsupportedModelError when the parallel state splits a model over ranks.
    """
    model = unfilled(checkpoint.hyperparameters, dtype=dtype, device=device, model_class=model_class)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    with loading_bar(num_parameters, is_shown=progress) as advance:
        fill(model.named_parameters(), checkpoint, _NAMES[model_class], advance=advance)
    return model


def random_gpt(size: Hyperparameters, *, dtype: torch.dtype, device: torch.device) -> Any:  # Any: the same
    """Builds a model with random weights, as `build_gpt` does: what a model costs depends on its shape.

    Raises: UnsupportedModelError when the parallel state splits a model over ranks.
    """
    model = unfilled(size, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, _RANDOM_DEVIATION, generator=generator)
        else:
            parameter.data.fill_(1)
    return model


def unfilled(
    size: Hyperparameters, *, dtype: torch.dtype, device: torch.device, model_class: ModelClass = "gpt"
) -> Any:  # Any: the same
    """Builds the model with uninitialised parameters, frozen, in eval mode.

    Raises: UnsupportedModelError when the parallel state splits a model over ranks.
    """
    _refuse_split_models()
    is_on_cpu = device.type != "cuda"
    build = _empty_hybrid if model_class == "hybrid" else _empty_gpt
    with nullcontext() if is_on_cpu else torch.cuda.device(device):
        model = build(size, dtype, is_on_cpu=is_on_cpu)
    _scale_rotary(model, size)
    add_parts(model, size)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(requires_grad=False)


def _refuse_split_models() -> None:
    for name, ranks in (
        ("tensor", parallel_state.get_tensor_model_parallel_world_size()),
        ("pipeline", parallel_state.get_pipeline_model_parallel_world_size()),
    ):
        if ranks > 1:
            raise UnsupportedModelError(
                f"the {name} model parallel size is {ranks}; load_model builds whole models, so it must be 1"
            )


def _empty_gpt(size: Hyperparameters, dtype: torch.dtype, *, is_on_cpu: bool) -> Any:  # Any: the same
    config = transformer_config(size, dtype, is_on_cpu=is_on_cpu)
    return GPTModel(config, gpt_spec(size, config), **_model_options(size))


def _empty_hybrid(size: Hyperparameters, dtype: torch.dtype, *, is_on_cpu: bool) -> Any:  # Any: the same
    config = transformer_config(size, dtype, is_on_cpu=is_on_cpu, is_hybrid=True)
    swaps = Swaps()
    # the stack's final norm is Transformer Engine's whatever the specs say, and stays torch's after this
    swaps.set(hybrid_block, "TENorm", WrappedTorchNorm)
    try:
        return HybridModel(
            config, hybrid_spec(size), hybrid_layer_pattern=hybrid_pattern(size), **_model_options(size)
        )
    finally:
        swaps.undo()


def _model_options(size: Hyperparameters) -> dict[str, Any]:  # Any: options of both classes
    return {
        "vocab_size": size.vocab_size,
        "max_sequence_length": size.max_positions,
        "parallel_output": False,
        "share_embeddings_and_output_weights": size.is_tied,
        "position_embedding_type": "rope",
        "rotary_percent": (size.rotary_dim or size.head_dim) / size.head_dim,
        "rotary_base": size.rotary_base,
    }


def _scale_rotary(model: Any, size: Hyperparameters) -> None:  # Any: the same
    """Gives the rotary module the frequencies of a scaled model, and attention its factor."""
    if size.rope_scaling is None:
        return
    rotary = model.rotary_pos_emb
    rotary.inv_freq = inverse_frequencies(size).to(rotary.inv_freq.device)
    for layer in model.decoder.layers:
        if hasattr(layer.self_attention, "_yarn_concentration_factor"):
            layer.self_attention._yarn_concentration_factor = size.rope_scaling.attention_factor  # noqa: SLF001 - megatron keeps it nowhere else
