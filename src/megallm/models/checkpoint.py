"""What every kind of checkpoint gives: hyperparameters, tensors and a tokenizer.

A reader of one file format implements `Checkpoint`; the model builder takes nothing else. Tensors
go by the names and in the row order of Hugging Face's Llama (`model.layers.0.self_attn.q_proj.weight`,
rotary halves side by side), whatever a file calls them and however it orders them. Knows no file
format and no megatron module.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from megallm.core_async.errors import ModelFileError
from megallm.models.tokenizer import ByteLevelTokenizer


class Hyperparameters(Struct, frozen=True, kw_only=True):
    """The numbers that fix a decoder with RMSNorm, rotary positions and gated SiLU, without biases."""

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


class TensorSpec(Struct, frozen=True):
    """One tensor a decoder of given hyperparameters has: name and shape, outermost dimension first."""

    name: str
    shape: tuple[int, ...]


def tensor_specs(size: Hyperparameters) -> list[TensorSpec]:
    """Gives every tensor that a checkpoint with these hyperparameters holds, and no other."""
    hidden, ffn = size.hidden_size, size.ffn_size
    query, kv = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    specs = [TensorSpec("model.embed_tokens.weight", (size.vocab_size, hidden))]
    for layer in range(size.num_layers):
        prefix = f"model.layers.{layer}."
        specs += [
            TensorSpec(prefix + "input_layernorm.weight", (hidden,)),
            TensorSpec(prefix + "self_attn.q_proj.weight", (query, hidden)),
            TensorSpec(prefix + "self_attn.k_proj.weight", (kv, hidden)),
            TensorSpec(prefix + "self_attn.v_proj.weight", (kv, hidden)),
            TensorSpec(prefix + "self_attn.o_proj.weight", (hidden, query)),
            TensorSpec(prefix + "post_attention_layernorm.weight", (hidden,)),
            TensorSpec(prefix + "mlp.gate_proj.weight", (ffn, hidden)),
            TensorSpec(prefix + "mlp.up_proj.weight", (ffn, hidden)),
            TensorSpec(prefix + "mlp.down_proj.weight", (hidden, ffn)),
        ]
    specs.append(TensorSpec("model.norm.weight", (hidden,)))
    if not size.is_tied:
        specs.append(TensorSpec("lm_head.weight", (size.vocab_size, hidden)))
    return specs


class Checkpoint(Protocol):
    """An opened checkpoint: every tensor is known to be there, in the right shape, before one is read."""

    @property
    def path(self) -> Path: ...

    @property
    def hyperparameters(self) -> Hyperparameters: ...

    def read(self, name: str) -> NDArray[np.float32]:
        """Gives one tensor of `tensor_specs`, in memory of its own."""
        ...

    def tokenizer(self) -> ByteLevelTokenizer:
        """Builds the tokenizer."""
        ...
