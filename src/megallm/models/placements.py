"""Where each tensor of a checkpoint goes in a megatron-core model, or in one rank's part of it.

Knows megatron's parameter names and how it lays rows out: one KV head's queries, its key and its value
together, gate above up. Knows which rows and columns tensor parallelism gives a rank. Knows no file format
and builds no model.
"""

from collections.abc import Callable, Iterator

from msgspec import Struct
from torch import Tensor

from megallm.core_async.errors import ModelFileError
from megallm.models.checkpoint import OUTPUT_NORMS, SCORE_BIAS, Checkpoint, Experts, Hyperparameters
from megallm.models.rank_part import RankPart

WHOLE = RankPart()
_RESIDUAL = (".o_proj.", ".down_proj.")
"""What gives the sums that are added to the residual."""


class Source(Struct, frozen=True):
    """A tensor of the checkpoint, or the rows or columns of it that a rank holds."""

    name: str
    rows: range | None = None
    columns: range | None = None


class Placement(Struct, frozen=True):
    """One parameter, and the tensors that fill it, one below the other or by KV head."""

    parameter: str
    sources: tuple[Source, ...]
    is_by_kv_head: bool = False
    is_padded: bool = False
    """It may have more rows than there are; those are zero."""


class LayerNames(Struct, frozen=True):
    """What a decoder calls the halves of one of our layers, and its final norm."""

    attention: str = "decoder.layers.{0}."
    mlp: str = "decoder.layers.{0}."
    final_norm: str = "decoder.final_layernorm.weight"


def fill(
    model_parameters: Iterator[tuple[str, Tensor]],
    checkpoint: Checkpoint,
    names: LayerNames,
    part: RankPart = WHOLE,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Copies what the rank holds of every tensor into the parameter that takes it, one at a time.

    `advance` is called with the number of parameters of each. A bias that the model has and the checkpoint
    has not becomes zero.

    Raises: ModelFileError naming a parameter and both shapes when they don't fit.
    """
    waiting = dict(model_parameters)
    for placement in placements(checkpoint.hyperparameters, names, part):
        parameter = waiting.pop(placement.parameter).data
        for source, target in zip(placement.sources, _targets(placement, parameter, checkpoint), strict=True):
            _copy(source, target, placement, checkpoint)
        advance(parameter.numel())
    for name, parameter in waiting.items():
        assert name.endswith(".bias"), f"parameter without a tensor in {checkpoint.path}: {name}"
        parameter.data.zero_()


def placements(size: Hyperparameters, names: LayerNames, part: RankPart = WHOLE) -> Iterator[Placement]:
    """Gives every parameter that a checkpoint fills on a rank, in the order of the layers."""
    vocabulary = part.vocabulary(size.vocab_size)
    embedding = Source("model.embed_tokens.weight", vocabulary)
    if part.has_embedding:
        yield Placement("embedding.word_embeddings.weight", (embedding,), is_padded=True)
    for place, layer in enumerate(part.layers(size.num_layers)):
        source = f"model.layers.{layer}."
        yield from _attention(size, part, source, names.attention.format(place, 2 * place))
        yield from _mlp(size, part, layer, names.mlp.format(place, 2 * place + 1))
    if not part.has_output:
        return
    yield from _norm(size, names.final_norm.removesuffix(".weight"), "model.norm")
    if not size.is_tied:
        yield Placement("output_layer.weight", (Source("lm_head.weight", vocabulary),), is_padded=True)
    elif not part.has_embedding:
        yield Placement("output_layer.weight", (embedding,), is_padded=True)


def _targets(placement: Placement, parameter: Tensor, checkpoint: Checkpoint) -> tuple[Tensor, ...]:
    """Gives the views of a parameter that its sources fill."""
    if placement.is_by_kv_head:
        return _by_kv_head(parameter, checkpoint.hyperparameters)
    if placement.is_padded:
        rows = placement.sources[0].rows
        num_rows = len(parameter) if rows is None else len(rows)
        parameter[num_rows:].zero_()
        return (parameter[:num_rows],)
    return parameter.chunk(len(placement.sources))


def _copy(source: Source, target: Tensor, placement: Placement, checkpoint: Checkpoint) -> None:
    size = checkpoint.hyperparameters
    values = checkpoint.read(source.name, rows=source.rows, columns=source.columns)
    if size.norm_offset and "norm" in source.name:
        values = values.float() + size.norm_offset
    if size.residual_factor != 1.0 and any(part in source.name for part in _RESIDUAL):
        values = values.float() * size.residual_factor
    if values.numel() != target.numel():
        raise ModelFileError(
            f"{checkpoint.path}: parameter {placement.parameter} takes {tuple(target.shape)} of "
            f"{source.name}, which is {tuple(values.shape)}"
        )
    target.copy_(values.view(target.shape))


def _attention(size: Hyperparameters, part: RankPart, source: str, target: str) -> Iterator[Placement]:
    if size.has_input_norms:
        yield from _norm(size, target + "input_layernorm", source + "input_layernorm")
    queries = part.tp.share(size.num_heads * size.head_dim)
    keys = part.tp.share(size.num_kv_heads * size.head_dim)
    for kind in ("weight", "bias") if size.has_qkv_bias else ("weight",):
        sources = tuple(
            Source(f"{source}self_attn.{name}_proj.{kind}", rows)
            for name, rows in (("q", queries), ("k", keys), ("v", keys))
        )
        yield Placement(f"{target}self_attention.linear_qkv.{kind}", sources, is_by_kv_head=True)
    output = Source(source + "self_attn.o_proj.weight", columns=queries)
    yield Placement(target + "self_attention.linear_proj.weight", (output,))
    if size.has_output_bias:
        yield _whole(target + "self_attention.linear_proj.bias", source + "self_attn.o_proj.bias")
    if size.has_sinks:
        sinks = Source(source + "self_attn.sinks", part.tp.share(size.num_heads))
        yield Placement(target + "self_attention.core_attention.softmax_offset", (sinks,))
    if size.has_output_norms:
        yield _whole(target + "self_attention.linear_proj.output_norm.weight", source + OUTPUT_NORMS[0])
    if size.has_qk_norm:
        for name in ("q", "k"):
            yield _whole(
                f"{target}self_attention.{name}_layernorm.weight", f"{source}self_attn.{name}_norm.weight"
            )


def _mlp(size: Hyperparameters, part: RankPart, layer: int, target: str) -> Iterator[Placement]:
    source = f"model.layers.{layer}."
    if size.has_input_norms:
        yield from _norm(size, target + "pre_mlp_layernorm", source + "post_attention_layernorm")
    if size.has_output_norms:
        yield _whole(target + "mlp.linear_fc2.output_norm.weight", source + OUTPUT_NORMS[1])
    if size.experts is None or not size.has_experts(layer):
        rows = part.tp.share(size.ffn_size)
        inner = ("gate", "up") if size.has_gate else ("up",)
        yield from _mlp_halves(
            source + "mlp.", target + "mlp.", rows, inner=inner, has_bias=size.has_mlp_bias
        )
        return
    for kind in ("weight", "bias") if size.experts.has_bias else ("weight",):
        yield _whole(f"{target}mlp.router.{kind}", f"{source}mlp.gate.{kind}")
    yield from _beside_experts(size.experts, part, source, target + "mlp.")
    rows = part.etp.share(size.experts.ffn_size)
    for place, expert in enumerate(part.experts(size.experts.num_experts)):
        yield from _mlp_halves(
            f"{source}mlp.experts.{expert}.",
            f"{target}mlp.experts.local_experts.{place}.",
            rows,
            has_bias=size.experts.has_bias,
        )


def _beside_experts(experts: Experts, part: RankPart, source: str, target: str) -> Iterator[Placement]:
    if experts.scoring == "sigmoid":
        yield _whole(target + "router.expert_bias", source + SCORE_BIAS)
    if experts.shared_ffn_size:
        rows = part.tp.share(experts.shared_ffn_size)
        yield from _mlp_halves(source + "mlp.shared_expert.", target + "shared_experts.", rows)
    if experts.has_shared_gate:
        yield _whole(target + "shared_experts.gate_weight", source + "mlp.shared_expert_gate.weight")


def _mlp_halves(
    source: str,
    target: str,
    rows: range | None,
    *,
    inner: tuple[str, ...] = ("gate", "up"),
    has_bias: bool = False,
) -> Iterator[Placement]:
    """Gives an MLP's placements; `rows`: of each `inner` projection that the rank holds."""
    for kind in ("weight", "bias") if has_bias else ("weight",):
        halves = tuple(Source(f"{source}{name}_proj.{kind}", rows) for name in inner)
        yield Placement(f"{target}linear_fc1.{kind}", halves)
    yield Placement(f"{target}linear_fc2.weight", (Source(f"{source}down_proj.weight", columns=rows),))
    if has_bias:
        yield _whole(f"{target}linear_fc2.bias", f"{source}down_proj.bias")


def _norm(size: Hyperparameters, parameter: str, tensor: str) -> Iterator[Placement]:
    for kind in ("weight", "bias") if size.norm == "layer" else ("weight",):
        yield _whole(f"{parameter}.{kind}", f"{tensor}.{kind}")


def _whole(parameter: str, tensor: str) -> Placement:
    return Placement(parameter, (Source(tensor),))


def _by_kv_head(parameter: Tensor, size: Hyperparameters) -> tuple[Tensor, Tensor, Tensor]:
    """Gives the query, key and value rows of a joint projection, as views of it."""
    queries = size.num_heads // size.num_kv_heads
    grouped = parameter.view(-1, queries + 2, size.head_dim, *parameter.shape[1:])
    return grouped[:, :queries], grouped[:, queries], grouped[:, queries + 1]
