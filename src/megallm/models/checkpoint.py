"""What every kind of checkpoint gives: hyperparameters, tensors and a tokenizer.

A reader of one file format implements `Checkpoint`; the model builder takes nothing else. Tensors
go by the names and in the row order of Hugging Face's Llama and Qwen3-MoE
(`model.layers.0.self_attn.q_proj.weight`, rotary halves side by side), whatever a file calls them and
however it orders them. Knows no file format and no megatron module.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol

from msgspec import Struct

from megallm.core_async.errors import ModelFileError
from megallm.models.base_tokenizer import ModelTokenizer

if TYPE_CHECKING:
    import torch


class RopeScaling(Struct, frozen=True, kw_only=True):
    """How rotary frequencies were changed so that longer texts fit; see rotary.py for each kind."""

    kind: Literal["linear", "llama3", "yarn", "factors", "dynamic"]
    factor: float = 1.0
    original_positions: int = 0
    """Tokens of context before the change."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    fast_rotations: float = 32.0
    slow_rotations: float = 1.0
    is_truncated: bool = True
    """YaRN's bounds are whole dimensions."""
    attention_factor: float = 1.0
    """On cosines and sines."""
    divisors: tuple[float, ...] = ()
    """Of the frequencies, one by one, where the kind is "factors"."""
    long_divisors: tuple[float, ...] = ()
    """The same for texts longer than `original_positions`; none are as the others."""

    @property
    def goes_by_length(self) -> bool:
        """Says whether the frequencies of long texts are others than those of short ones."""
        return self.kind == "dynamic" or bool(self.long_divisors)


class Experts(Struct, frozen=True, kw_only=True):
    """The mixture of experts that stands in place of the MLP."""

    num_experts: int
    num_chosen: int
    """Experts that run for a token."""
    ffn_size: int
    is_renormalised: bool
    """The shares of the chosen experts sum to one."""
    dense_layers: tuple[int, ...] = ()
    """Layers, counted from 0, that have a plain MLP instead."""
    has_bias: bool = False
    """The experts have biases, and their scores."""
    shared_ffn_size: int = 0
    """Of the expert that runs for every token; 0 is none."""
    has_shared_gate: bool = False
    """What the shared expert gives has a share, too."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Scores by sigmoid have a bias, which the choice sees and the shares don't."""
    share_factor: float = 1.0
    """On the shares of experts chosen by sigmoid."""


class Hyperparameters(Struct, frozen=True, kw_only=True):
    """The numbers that fix a decoder with rotary positions."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    """Rows of the embedding: at least the tokenizer's size."""
    max_positions: int
    """Tokens of context the model was trained for."""
    rotary_base: float
    norm_epsilon: float
    is_tied: bool
    """The output projection is the embedding."""
    rotary_dim: int | None = None
    """Dimensions of a head that turn; None is all."""
    rope_scaling: RopeScaling | None = None
    unturned_layers: tuple[int, ...] = ()
    """Layers, counted from 0, without rotary positions."""
    window: int | None = None
    """How many tokens before its own a query sees in the layers of `windowed_layers`."""
    windowed_layers: tuple[int, ...] = ()
    is_rope_interleaved: bool = False
    """The dimensions of a rotary pair lie side by side, not half of them apart."""
    windowed_rotary_base: float | None = None
    """Of the layers with a window, which it leaves unscaled; None is as the others turn."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    """The attention's output projection has a bias."""
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    """Queries and keys are normed, head by head."""
    is_qk_norm_joint: bool = False
    """They are normed over all heads at once instead."""
    has_input_norms: bool = True
    """What attention and MLP take is normed."""
    has_output_norms: bool = False
    """What attention and MLP give is normed before it is added."""
    norm: Literal["rms", "layer"] = "rms"
    """Layer norms centre, too, and have biases."""
    norm_offset: float = 0.0
    """Added to the weights of every norm."""
    activation: Literal["silu", "gelu_tanh", "quick_gelu"] = "silu"
    """Of the gate, or of what the MLP has without one."""
    has_gate: bool = True
    """The MLP has a gate."""
    gate_bound: float | None = None
    """The gate is no more than this, and the other factor, plus one then, within it of zero."""
    has_sinks: bool = False
    """Each head's softmax has one more term, a logit of its own without a value."""
    embedding_factor: float = 1.0
    """On the embedded tokens, not on the output projection that may be tied to them."""
    residual_factor: float = 1.0
    """On what attention and MLP give, before it is added."""
    score_scale: float | None = None
    """Factor on attention's scores; None is the inverse root of `head_dim`."""
    score_softcap: float | None = None
    """Scores s become `softcap * tanh(s / softcap)`."""
    logit_softcap: float | None = None
    """The same of logits."""
    logit_factor: float = 1.0
    """On logits."""
    experts: Experts | None = None
    layer_kinds: str | None = None
    """Of layers that are attention `*`, an MLP `-` or experts `E` alone; None: each is two of these."""

    @property
    def turned_dim(self) -> int:
        """Gives how many dimensions of a head turn."""
        return self.rotary_dim or self.head_dim

    @property
    def num_attention_layers(self) -> int:
        """Gives how many layers have keys and values."""
        return self.num_layers if self.layer_kinds is None else self.layer_kinds.count("*")

    def has_experts(self, layer: int) -> bool:
        """Says whether a layer, counted from 0, has experts in place of its MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def check(self, path: Path) -> None:
        """Refuses numbers that no such decoder has.

        Raises: ModelFileError naming `path` and the number.
        """
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size"):
            number: int = getattr(self, name)
            if number < 1:
                raise ModelFileError(f"{path}: {name} is {number}, at least 1 is needed; the file is damaged")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"{path}: num_heads is {self.num_heads}, no multiple of num_kv_heads, {self.num_kv_heads}; "
                "the file is damaged"
            )
        if self.head_dim % 2:
            raise ModelFileError(
                f"{path}: head_dim is {self.head_dim}, rotary positions need an even one; the file is damaged"
            )
        if self.rotary_dim is not None and not 0 < self.rotary_dim <= self.head_dim:
            raise ModelFileError(
                f"{path}: rotary_dim is {self.rotary_dim}, head_dim is {self.head_dim}; the file is damaged"
            )
        scaling, num_pairs = self.rope_scaling, self.turned_dim // 2
        if scaling is not None and scaling.kind == "factors":
            for divisors in (scaling.divisors, scaling.long_divisors or scaling.divisors):
                if len(divisors) != num_pairs:
                    raise ModelFileError(
                        f"{path}: {len(divisors)} factors are to divide {num_pairs} rotary frequencies; "
                        "the file is damaged"
                    )
        if self.experts is not None and not 0 < self.experts.num_chosen <= self.experts.num_experts:
            raise ModelFileError(
                f"{path}: {self.experts.num_chosen} of {self.experts.num_experts} experts run for a token; "
                "the file is damaged"
            )


OUTPUT_NORMS: Final = ("attention_output_norm.weight", "mlp_output_norm.weight")
"""Our names of the norms that Llama has not."""
_ATTENTION_PARTS: Final = ("input_layernorm.", "self_attn.", "attention_output_norm.")
SCORE_BIAS: Final = "mlp.gate.e_score_correction_bias"


class TensorSpec(Struct, frozen=True):
    """One tensor a decoder of given hyperparameters has: name and shape, outermost dimension first."""

    name: str
    shape: tuple[int, ...]


def tensor_specs(size: Hyperparameters) -> list[TensorSpec]:
    """Gives every tensor that a checkpoint with these hyperparameters holds, and no other."""
    specs = [TensorSpec("model.embed_tokens.weight", (size.vocab_size, size.hidden_size))]
    for layer in range(size.num_layers):
        prefix = f"model.layers.{layer}."
        shapes = [*_attention_shapes(size), *_mlp_shapes(size, layer)]
        if size.has_output_norms:
            shapes += [(name, (size.hidden_size,)) for name in OUTPUT_NORMS]
        if size.layer_kinds is not None:
            is_attention = size.layer_kinds[layer] == "*"
            shapes = [each for each in shapes if each[0].startswith(_ATTENTION_PARTS) == is_attention]
        specs += [TensorSpec(prefix + name, shape) for name, shape in shapes]
    specs += [TensorSpec(name, shape) for name, shape in _norm_shapes(size, "model.norm")]
    if not size.is_tied:
        specs.append(TensorSpec("lm_head.weight", (size.vocab_size, size.hidden_size)))
    return specs


def _attention_shapes(size: Hyperparameters) -> Iterator[tuple[str, tuple[int, ...]]]:
    query, kv = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    if size.has_input_norms:
        yield from _norm_shapes(size, "input_layernorm")
    for name, rows in (("q", query), ("k", kv), ("v", kv)):
        yield f"self_attn.{name}_proj.weight", (rows, size.hidden_size)
        if size.has_qkv_bias:
            yield f"self_attn.{name}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (size.hidden_size, query)
    if size.has_output_bias:
        yield "self_attn.o_proj.bias", (size.hidden_size,)
    if size.has_sinks:
        yield "self_attn.sinks", (size.num_heads,)
    if size.has_qk_norm:
        yield "self_attn.q_norm.weight", (query if size.is_qk_norm_joint else size.head_dim,)
        yield "self_attn.k_norm.weight", (kv if size.is_qk_norm_joint else size.head_dim,)
    if size.has_input_norms:
        yield from _norm_shapes(size, "post_attention_layernorm")


def _norm_shapes(size: Hyperparameters, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size.hidden_size,)
    if size.norm == "layer":
        yield f"{name}.bias", (size.hidden_size,)


def _mlp_shapes(size: Hyperparameters, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = size.hidden_size
    if size.experts is not None and size.has_experts(layer):
        yield "mlp.gate.weight", (size.experts.num_experts, hidden)
        if size.experts.has_bias:
            yield "mlp.gate.bias", (size.experts.num_experts,)
        for expert in range(size.experts.num_experts):
            for name, shape in _gated_shapes(hidden, size.experts.ffn_size):
                yield f"mlp.experts.{expert}.{name}.weight", shape
                if size.experts.has_bias:
                    yield f"mlp.experts.{expert}.{name}.bias", shape[:1]
        yield from _shared_expert_shapes(hidden, size.experts)
        return
    for name, shape in _gated_shapes(hidden, size.ffn_size)[0 if size.has_gate else 1 :]:
        yield f"mlp.{name}.weight", shape
        if size.has_mlp_bias:
            yield f"mlp.{name}.bias", shape[:1]


def _shared_expert_shapes(hidden: int, experts: Experts) -> Iterator[tuple[str, tuple[int, ...]]]:
    if experts.scoring == "sigmoid":
        yield SCORE_BIAS, (experts.num_experts,)
    if experts.shared_ffn_size:
        for name, shape in _gated_shapes(hidden, experts.shared_ffn_size):
            yield f"mlp.shared_expert.{name}.weight", shape
    if experts.has_shared_gate:
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def _gated_shapes(hidden: int, ffn: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    return ("gate_proj", (ffn, hidden)), ("up_proj", (ffn, hidden)), ("down_proj", (hidden, ffn))


class Checkpoint(Protocol):
    """An opened checkpoint: every tensor is known to be there, in the right shape, before one is read."""

    @property
    def path(self) -> Path: ...

    @property
    def hyperparameters(self) -> Hyperparameters: ...

    def read(self, name: str, *, rows: range | None = None, columns: range | None = None) -> "torch.Tensor":
        """Gives one tensor of `tensor_specs`, on the CPU, as floating point, in memory of its own.

        Or some of its rows or columns; rows of queries and keys are those of whole heads.
        """
        ...

    def tokenizer(self) -> ModelTokenizer:
        """Builds the tokenizer."""
        ...
