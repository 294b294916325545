"""A checkpoint as a megatron-core model: GPTModel, or HybridModel of attention and MLP layers.

Where megatron's parallel state splits models, this rank's part of it. Knows how the two classes are built on
a device and filled; knows no file format.
"""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megallm.core_async.device.swaps import Swaps
from megallm.models.checkpoint import Checkpoint, Hyperparameters
from megallm.models.extra_parts import add_parts
from megallm.models.loading_bar import LoadingBar
from megallm.models.megatron_config import gpt_spec, hybrid_pattern, hybrid_spec, transformer_config
from megallm.models.megatron_setup import current_part
from megallm.models.placements import LayerNames, fill
from megallm.models.rank_part import RankPart
from megallm.models.rotary_modules import fit_rotary

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
    bar: LoadingBar,
    model_class: ModelClass = "gpt",
) -> Any:  # Any: GPTModel or HybridModel, which are untyped
    """Builds the model on `device`, in eval mode, its parameters frozen, `dtype` and filled.

    Host memory peaks at the model (on a CPU) plus one tensor as it is stored: tensors are read and
    copied one by one, and of each what this rank holds. `bar` shows how far it is. Needs megatron's
    parallel state.

    Raises: ValueError when the parallel state's sizes don't divide the model.
    """
    model = unfilled(checkpoint.hyperparameters, dtype=dtype, device=device, model_class=model_class)
    tensors = dict(_tensors(model))
    bar.begin(sum(map(torch.Tensor.numel, tensors.values())))
    fill(iter(tensors.items()), checkpoint, _NAMES[model_class], current_part(), advance=bar.advance)
    return model


def random_gpt(
    size: Hyperparameters, *, dtype: torch.dtype, device: torch.device, model_class: ModelClass = "gpt"
) -> Any:  # Any: the same
    """Builds a model with random weights, as `build_gpt` does: what a model costs depends on its shape.

    Raises: ValueError when the parallel state's sizes don't divide the model.
    """
    model = unfilled(size, dtype=dtype, device=device, model_class=model_class)
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

    Raises: ValueError when the parallel state's sizes don't divide the model.
    """
    part = current_part()
    part.sizes.check_model(size)
    is_hybrid = model_class == "hybrid"
    build = _empty_hybrid if is_hybrid else _empty_gpt
    groups: Any = ProcessGroupCollection.use_mpu_process_groups()  # Any: its types know no None
    # or the first and the last stage would add up, on a GPU, the unfilled embeddings that both hold
    embedding_group, groups.embd = groups.embd, None
    with _current(device):
        config = transformer_config(
            size, part.sizes, dtype, is_on_cpu=device.type != "cuda", is_hybrid=is_hybrid
        )
        model = build(size, config, pg_collection=groups, **_model_options(size, part))
    model.embd_group = groups.embd = embedding_group
    model.vocab_size = size.vocab_size  # without the padding, which nobody may sample
    fit_rotary(model, size)
    add_parts(model, size)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(requires_grad=False)


@contextmanager
def _current(device: torch.device) -> Generator[None]:
    """Makes a device the current one for megatron, some of whose modules ask CUDA for it on a CPU, too."""
    swaps = Swaps()
    if device.type != "cuda":
        swaps.set(torch.cuda, "current_device", lambda: device)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    finally:
        swaps.undo()


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:  # Any: the same
    """Gives all that a checkpoint fills: parameters, and routers' biases, which megatron keeps in float32."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias"):
            buffer.data = buffer.data.float()
            yield name, buffer


def _empty_gpt(
    size: Hyperparameters, config: TransformerConfig, **options: Any
) -> Any:  # Any: options of both classes, and the same
    return GPTModel(config, gpt_spec(size, config), **options)


def _empty_hybrid(size: Hyperparameters, config: TransformerConfig, **options: Any) -> Any:  # Any: the same
    swaps = Swaps()
    # the stack's final norm is Transformer Engine's whatever the specs say, and stays torch's after this
    swaps.set(hybrid_block, "TENorm", WrappedTorchNorm)
    pattern = hybrid_pattern(size, config.pipeline_model_parallel_size)
    try:
        return HybridModel(config, hybrid_spec(size), hybrid_layer_pattern=pattern, **options)
    finally:
        swaps.undo()


def _model_options(size: Hyperparameters, part: RankPart) -> dict[str, Any]:  # Any: options of both classes
    return {
        "vocab_size": part.padded_vocab_size(size.vocab_size),
        "max_sequence_length": size.max_positions,
        "pre_process": part.has_embedding,
        "post_process": part.has_output,
        "parallel_output": False,
        "share_embeddings_and_output_weights": size.is_tied,
        "position_embedding_type": "rope",
        "rotary_percent": size.turned_dim / size.head_dim,
        "rotary_base": size.windowed_rotary_base or size.rotary_base,
    }
