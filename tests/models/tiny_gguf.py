"""Writes small GGUF files of the Llama family, whole or with one thing wrong."""
# gguf is partly untyped:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
from numpy.typing import NDArray

from megallm.models.checkpoint import Hyperparameters, tensor_specs

TINY = Hyperparameters(
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    vocab_size=272,
    max_positions=128,
    rotary_base=10_000.0,
    norm_epsilon=1e-5,
    is_tied=True,
)
FORMATS = [
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
]
"""Those that the `gguf` package turns into floating point."""

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "t h", "th e", "Ġ the"]
USER_DEFINED = "<think>"
FILE_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
    "model.layers": "blk",
}

type Weights = dict[str, NDArray[np.float32]]
type Metadata = dict[str, str | int | float | bool | list[str] | list[int] | list[float]]


def tiny_weights(size: Hyperparameters = TINY) -> Weights:
    """Gives random weights by Hugging Face's names, in its row order."""
    rng = np.random.default_rng(0)
    return {
        spec.name: rng.standard_normal(spec.shape, np.float32) / np.float32(8) for spec in tensor_specs(size)
    }


def tiny_metadata(size: Hyperparameters = TINY) -> Metadata:
    """Gives the metadata of a sound file, tokenizer included."""
    symbols = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    symbols += [chr(256 + index) for index in range(256 - len(symbols))]
    tokens = SPECIAL_TOKENS + symbols + [merge.replace(" ", "") for merge in MERGES] + [USER_DEFINED]
    return {
        "general.architecture": "llama",
        "llama.block_count": size.num_layers,
        "llama.context_length": size.max_positions,
        "llama.embedding_length": size.hidden_size,
        "llama.feed_forward_length": size.ffn_size,
        "llama.attention.head_count": size.num_heads,
        "llama.attention.head_count_kv": size.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": size.norm_epsilon,
        "llama.rope.freq_base": size.rotary_base,
        "llama.attention.key_length": size.head_dim,
        "llama.rope.dimension_count": size.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 4) + [4],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(
    path: Path, metadata: Metadata, tensors: Weights, stored: str | Callable[[str], str] = "F32"
) -> Path:
    """Writes a file as it is told, tensors by their names in the file; matrices are stored as `stored`.

    That is a format, or what gives one for a name.
    """
    writer = gguf.GGUFWriter(path, str(metadata["general.architecture"]))
    add: dict[type, Callable[[str, str | int | float | bool | list[str] | list[int] | list[float]], None]] = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }  # pyright: ignore[reportAssignmentType] - each takes the type it stands under
    for key, value in metadata.items():
        if key != "general.architecture":
            add[type(value)](key, value)
    for name, values in tensors.items():
        form = "F32" if values.ndim == 1 else stored if isinstance(stored, str) else stored(name)
        kind = gguf.GGMLQuantizationType[form]
        writer.add_tensor(name, quantised(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantised(
    values: NDArray[np.float32], kind: gguf.GGMLQuantizationType
) -> NDArray[Any]:  # Any: per format
    """Gives values in a format; in one that the `gguf` package only reads, blocks of random weights."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:  # the package's word for a format that it only reads
        rng = np.random.default_rng(3)
        num_items, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(
            0, 256, (*values.shape[:-1], values.shape[-1] // num_items, num_bytes), np.uint8
        )
        # whichever two bytes are a block's scale, in half precision they are no infinity and no NaN
        return (blocks & 0x2F).reshape(*values.shape[:-1], -1)


def file_tensors(weights: Weights, size: Hyperparameters = TINY, *, is_interleaved: bool = True) -> Weights:
    """Gives weights under llama.cpp's names, query and key rows in the order it has for Llama."""
    renamed: Weights = {}
    for name, values in weights.items():
        ordered = values
        if is_interleaved and name.endswith("q_proj.weight"):
            ordered = _interleaved(values, size.num_heads)
        elif is_interleaved and name.endswith("k_proj.weight"):
            ordered = _interleaved(values, size.num_kv_heads)
        short = name
        for theirs, files in FILE_NAMES.items():
            short = short.replace(theirs, files)
        renamed[short] = ordered
    return renamed


def write_tiny(path: Path, stored: str = "F32", size: Hyperparameters = TINY) -> Weights:
    """Writes a sound file; gives its weights by Hugging Face's names."""
    weights = tiny_weights(size)
    write_gguf(path, tiny_metadata(size), file_tensors(weights, size), stored)
    return weights


def write_hf_as_gguf(model: Any, path: Path) -> Path:  # Any: a model of transformers
    """Writes transformers' model as llama.cpp's converter would, with the tiny file's tokenizer."""
    settings = model.config
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    size = msgspec.structs.replace(
        TINY,
        num_layers=settings.num_hidden_layers,
        hidden_size=settings.hidden_size,
        head_dim=head_dim,
        ffn_size=settings.intermediate_size,
        norm_epsilon=settings.rms_norm_eps,
        rotary_base=settings.rope_parameters["rope_theta"],
    )
    architecture = settings.model_type
    metadata = {
        key.replace("llama.", architecture + "."): value for key, value in tiny_metadata(size).items()
    }
    metadata["general.architecture"] = architecture
    weights: Weights = {name: values.numpy() for name, values in model.state_dict().items()}
    return write_gguf(path, metadata, file_tensors(weights, size, is_interleaved=architecture == "llama"))


def _interleaved(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
