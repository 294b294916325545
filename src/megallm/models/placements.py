"""Where each tensor of a checkpoint goes in a megatron-core model.

Knows megatron's parameter names and how it lays rows out: one KV head's queries, its key and its value
together, gate above up. Knows no file format and builds no model.
"""

from collections.abc import Callable, Iterator

from msgspec import Struct
from torch import Tensor

from megallm.core_async.errors import ModelFileError
from megallm.models.checkpoint import OUTPUT_NORMS, Checkpoint, Hyperparameters


class Placement(Struct, frozen=True):
    """One parameter, and the tensors that fill it, one below the other or by KV head."""

    parameter: str
    tensors: tuple[str, ...]
    is_by_kv_head: bool = False


class LayerNames(Struct, frozen=True):
    """What a decoder calls the halves of one of our layers, and its final norm."""

    attention: str = "decoder.layers.{0}."
    mlp: str = "decoder.layers.{0}."
    final_norm: str = "decoder.final_layernorm.weight"


def fill(
    model_parameters: Iterator[tuple[str, Tensor]],
    checkpoint: Checkpoint,
    names: LayerNames,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Copies every tensor of the checkpoint into the parameter that holds it, one at a time.

    `advance` is called with the number of parameters of each. A bias that the model has and the checkpoint
    has not becomes zero.

    Raises: ModelFileError naming a parameter and both shapes when they don't fit.
    """
    waiting = dict(model_parameters)
    size = checkpoint.hyperparameters
    for placement in placements(size, names):
        parameter = waiting.pop(placement.parameter).data
        if placement.is_by_kv_head:
            parts = _by_kv_head(parameter, size)
        else:
            parts = parameter.chunk(len(placement.tensors))
        for name, part in zip(placement.tensors, parts, strict=True):
            values = checkpoint.read(name)
            if size.norm_offset and "norm" in name:
                values = values.float() + size.norm_offset
            if values.numel() != part.numel():
                raise ModelFileError(
                    f"{checkpoint.path}: parameter {placement.parameter} takes {tuple(part.shape)} of "
                    f"{name}, which is {tuple(values.shape)}"
                )
            part.copy_(values.view(part.shape))
            advance(part.numel())
            del values  # or it would still be in memory while the next one is read
    for name, parameter in waiting.items():
        assert name.endswith(".bias"), f"parameter without a tensor in {checkpoint.path}: {name}"
        parameter.data.zero_()


def placements(size: Hyperparameters, names: LayerNames) -> Iterator[Placement]:
    """Gives every parameter that a checkpoint fills, in the order of the layers."""
    yield Placement("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    for layer in range(size.num_layers):
        source = f"model.layers.{layer}."
        yield from _attention(size, source, names.attention.format(layer, 2 * layer))
        yield from _mlp(size, layer, source, names.mlp.format(layer, 2 * layer + 1))
    yield Placement(names.final_norm, ("model.norm.weight",))
    if not size.is_tied:
        yield Placement("output_layer.weight", ("lm_head.weight",))


def _attention(size: Hyperparameters, source: str, target: str) -> Iterator[Placement]:
    yield Placement(target + "input_layernorm.weight", (source + "input_layernorm.weight",))
    kinds = ("weight", "bias") if size.has_qkv_bias else ("weight",)
    for kind in kinds:
        tensors = tuple(f"{source}self_attn.{name}_proj.{kind}" for name in ("q", "k", "v"))
        yield Placement(f"{target}self_attention.linear_qkv.{kind}", tensors, is_by_kv_head=True)
    yield Placement(target + "self_attention.linear_proj.weight", (source + "self_attn.o_proj.weight",))
    if size.has_output_bias:
        yield Placement(target + "self_attention.linear_proj.bias", (source + "self_attn.o_proj.bias",))
    if size.has_output_norms:
        norm = target + "self_attention.linear_proj.output_norm.weight"
        yield Placement(norm, (source + OUTPUT_NORMS[0],))
    if size.has_qk_norm:
        for name in ("q", "k"):
            norm = f"{target}self_attention.{name}_layernorm.weight"
            yield Placement(norm, (f"{source}self_attn.{name}_norm.weight",))


def _mlp(size: Hyperparameters, layer: int, source: str, target: str) -> Iterator[Placement]:
    yield Placement(target + "pre_mlp_layernorm.weight", (source + "post_attention_layernorm.weight",))
    if size.has_output_norms:
        yield Placement(target + "mlp.linear_fc2.output_norm.weight", (source + OUTPUT_NORMS[1],))
    if size.experts is None or not size.has_experts(layer):
        kinds = ("weight", "bias") if size.has_mlp_bias else ("weight",)
        for kind in kinds:
            yield from _gated(source + "mlp.", target + "mlp.", kind)
        return
    yield Placement(target + "mlp.router.weight", (source + "mlp.gate.weight",))
    for expert in range(size.experts.num_experts):
        yield from _gated(
            f"{source}mlp.experts.{expert}.", f"{target}mlp.experts.local_experts.{expert}.", "weight"
        )


def _gated(source: str, target: str, kind: str) -> Iterator[Placement]:
    yield Placement(f"{target}linear_fc1.{kind}", (f"{source}gate_proj.{kind}", f"{source}up_proj.{kind}"))
    yield Placement(f"{target}linear_fc2.{kind}", (f"{source}down_proj.{kind}",))


def _by_kv_head(parameter: Tensor, size: Hyperparameters) -> tuple[Tensor, Tensor, Tensor]:
    """Gives the query, key and value rows of a joint projection, as views of it."""
    queries = size.num_heads // size.num_kv_heads
    grouped = parameter.view(size.num_kv_heads, queries + 2, size.head_dim, *parameter.shape[1:])
    return grouped[:, :queries], grouped[:, queries], grouped[:, queries + 1]
