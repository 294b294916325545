"""A GGUF file of the Llama, Qwen2 or Qwen3 family as a checkpoint.

Knows llama.cpp's names for metadata and tensors and its order of query and key rows; knows neither
torch nor megatron-core.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.base_tokenizer import ModelTokenizer
from megallm.models.checkpoint import Hyperparameters, RopeScaling, tensor_specs
from megallm.models.gguf_file import GgufFile
from megallm.models.gguf_tokenizer import build_tokenizer

if TYPE_CHECKING:
    import torch


class Family(Struct, frozen=True, kw_only=True):
    """One family: what it has, and how its rows are ordered."""

    is_interleaved: bool = False
    """The two rows of a rotated pair lie side by side."""
    has_qkv_bias: bool = False
    has_qk_norm: bool = False


FAMILIES: Final = {
    "llama": Family(is_interleaved=True),
    "qwen2": Family(has_qkv_bias=True),
    "qwen3": Family(has_qk_norm=True),
}
"""By the file's name of the architecture."""

_ROPE_DIVISORS: Final = "rope_freqs.weight"
_NAMES: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufCheckpoint:
    """A file of a known family, checked to hold exactly the tensors its hyperparameters call for.

    Raises: UnsupportedModelError for another family, or for parts this one has not; ModelFileError
    for a damaged file.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        architecture = file.value("general.architecture", str)
        if architecture not in FAMILIES:
            raise UnsupportedModelError(
                f"{file.path} holds a model of architecture {architecture!r}, supported are "
                f"{list(FAMILIES)}; build the megatron-core model yourself and pass it to MegatronLLM"
            )
        self._family = FAMILIES[architecture]
        self._size = _hyperparameters(file, architecture)
        self._size.check(file.path)
        self._check_tensors(architecture)

    @property
    def path(self) -> Path:
        """Gives the file's path."""
        return self._file.path

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Gives the decoder's numbers."""
        return self._size

    def read(self, name: str, *, rows: range | None = None, columns: range | None = None) -> "torch.Tensor":
        """Gives one tensor of `tensor_specs`, or a part, dequantised to float32; see Checkpoint."""
        import torch

        values = self._file.read(_file_name(name), rows=rows, columns=columns)
        if self._family.is_interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _split_rotary_halves(values, len(values) // self._size.head_dim)
        return torch.from_numpy(values)

    def tokenizer(self) -> ModelTokenizer:
        """Builds the tokenizer from the file's metadata.

        Raises: UnsupportedModelError for a kind of tokenizer that is not built here.
        """
        return build_tokenizer(self._file)

    def _check_tensors(self, architecture: str) -> None:
        wanted = {_file_name(spec.name): spec.shape for spec in tensor_specs(self._size)}
        unknown = sorted(self._file.tensors.keys() - wanted.keys() - {_ROPE_DIVISORS})
        if unknown:
            raise UnsupportedModelError(
                f"{self.path} has {len(unknown)} tensors that a plain {architecture} has not, {unknown[0]} "
                "the first; a model of other parts would be loaded wrong"
            )
        for name, shape in wanted.items():
            if name not in self._file.tensors:
                raise ModelFileError(
                    f"{self.path} has no tensor {name}; the file is incomplete, fetch it again"
                )
            found = self._file.tensors[name].shape
            if found != shape:
                raise ModelFileError(
                    f"{self.path}: tensor {name} has shape {found}, its metadata calls for {shape}; "
                    "the file is damaged, fetch it again"
                )
            self._file.check_readable(name)


class _Keys(Struct, frozen=True):
    """The family's metadata by key, under the architecture's prefix."""

    file: GgufFile
    prefix: str

    def count(self, key: str) -> int:
        return self.file.value(f"{self.prefix}.{key}", int)

    def count_or(self, key: str, default: int) -> int:
        return self.file.value_or(f"{self.prefix}.{key}", default)

    def real(self, key: str) -> float:
        return self.file.value(f"{self.prefix}.{key}", float)

    def real_or(self, key: str, default: float) -> float:
        return self.file.value_or(f"{self.prefix}.{key}", default)


def _hyperparameters(file: GgufFile, architecture: str) -> Hyperparameters:
    keys = _Keys(file, architecture)
    family = FAMILIES[architecture]
    if "token_embd.weight" not in file.tensors:
        raise ModelFileError(
            f"{file.path} has no tensor token_embd.weight; the file is incomplete, fetch it again"
        )
    num_heads = keys.count("attention.head_count")
    hidden_size = keys.count("embedding_length")
    if num_heads < 1:
        raise ModelFileError(
            f"{file.path}: {architecture}.attention.head_count is {num_heads}, at least 1 is needed"
        )
    head_dim = keys.count_or("attention.key_length", hidden_size // num_heads)
    _refuse_rotary_variants(file, keys, head_dim)
    return Hyperparameters(
        num_layers=keys.count("block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=keys.count_or("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_size=keys.count("feed_forward_length"),
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        max_positions=keys.count("context_length"),
        rotary_base=keys.real_or("rope.freq_base", 10_000.0),
        norm_epsilon=keys.real("attention.layer_norm_rms_epsilon"),
        is_tied="output.weight" not in file.tensors,
        rope_scaling=_rope_divisors(file, head_dim),
        has_qkv_bias=family.has_qkv_bias,
        has_qk_norm=family.has_qk_norm,
    )


def _rope_divisors(file: GgufFile, head_dim: int) -> RopeScaling | None:
    """Gives the scaling of Llama 3's files, which hold what each frequency is divided by."""
    if _ROPE_DIVISORS not in file.tensors:
        return None
    divisors = file.read(_ROPE_DIVISORS)
    if divisors.shape != (head_dim // 2,) or not (divisors > 0).all():
        raise ModelFileError(
            f"{file.path}: tensor {_ROPE_DIVISORS} has shape {divisors.shape}, {head_dim // 2} positive "
            "numbers are needed; the file is damaged"
        )
    return RopeScaling(kind="factors", divisors=tuple(map(float, divisors)))


def _refuse_rotary_variants(file: GgufFile, keys: _Keys, head_dim: int) -> None:
    scaling = file.value_or(f"{keys.prefix}.rope.scaling.type", "none")
    if scaling != "none":
        raise UnsupportedModelError(
            f"{file.path} scales rotary positions ({scaling}); supported is no scaling, and Llama 3's"
        )
    stretch = keys.real_or("rope.scale_linear", 1.0)
    if stretch != 1.0:
        raise UnsupportedModelError(
            f"{file.path} stretches rotary positions by {stretch}; supported is no scaling, and Llama 3's"
        )
    rotary_dim = keys.count_or("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise UnsupportedModelError(
            f"{file.path} rotates {rotary_dim} of {head_dim} dimensions of a head; supported is all of them"
        )


def _file_name(name: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    return f"blk.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}" if layer else _NAMES[name]


def _split_rotary_halves(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Gives a projection's rows with each head's first rotary halves before its second ones.

    llama.cpp stores the two of a rotated pair side by side, `[heads, head_dim / 2, 2, in]`.
    """
    num_rows, num_columns = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(num_rows, num_columns)
