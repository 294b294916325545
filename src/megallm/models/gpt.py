"""A checkpoint as a megatron-core GPTModel.

Knows megatron's config, its local layer specs (plain torch, no Transformer Engine) and how it lays
weights out; knows no file format.
"""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterator

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from numpy.typing import NDArray
from torch.nn.functional import silu

from megallm.core_async.errors import ModelFileError, UnsupportedModelError
from megallm.models.checkpoint import Checkpoint, Hyperparameters

_RANDOM_DEVIATION = 0.02
"""Of random weights: what models are initialised with."""


def build_gpt(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> GPTModel:
    """Builds the model on `device`, in eval mode, its parameters frozen, `dtype` and filled.

    Host memory peaks at the model (on a CPU) plus one layer tensor in float32: tensors are read and
    copied one by one. Needs megatron's parallel state.

    Raises: UnsupportedModelError when the parallel state splits a model over ranks.
    """
    model = _unfilled_gpt(checkpoint.hyperparameters, dtype, device)
    _fill(model, checkpoint)
    return model


def random_gpt(size: Hyperparameters, *, dtype: torch.dtype, device: torch.device) -> GPTModel:
    """Builds a model with random weights, as `build_gpt` does: what a model costs depends on its shape.

    Raises: UnsupportedModelError when the parallel state splits a model over ranks.
    """
    model = _unfilled_gpt(size, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, _RANDOM_DEVIATION, generator=generator)
        else:
            parameter.data.fill_(1)
    return model


def _unfilled_gpt(size: Hyperparameters, dtype: torch.dtype, device: torch.device) -> GPTModel:
    _refuse_split_models()
    if device.type == "cuda":
        with torch.cuda.device(device):
            model = _empty_gpt(size, dtype, is_on_cpu=False)
    else:
        model = _empty_gpt(size, dtype, is_on_cpu=True)
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


def _empty_gpt(size: Hyperparameters, dtype: torch.dtype, *, is_on_cpu: bool) -> GPTModel:
    """Builds the model with uninitialised parameters, on the CPU or on the current CUDA device."""
    config = TransformerConfig(
        num_layers=size.num_layers,
        hidden_size=size.hidden_size,
        num_attention_heads=size.num_heads,
        num_query_groups=size.num_kv_heads,
        kv_channels=size.head_dim,
        ffn_hidden_size=size.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=size.norm_epsilon,
        activation_func=silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=is_on_cpu,
        perform_initialization=False,
        # torch.compile'd or CUDA-only versions of what the local spec does in plain torch
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=size.vocab_size,
        max_sequence_length=size.max_positions,
        parallel_output=False,
        share_embeddings_and_output_weights=size.is_tied,
        position_embedding_type="rope",
        rotary_base=size.rotary_base,  # pyright: ignore[reportArgumentType] - declared int, used as a number
    )


def _fill(model: GPTModel, checkpoint: Checkpoint) -> None:
    """Copies every tensor of the checkpoint into the parameter that holds it."""
    waiting = dict(model.named_parameters())
    for name, values in _megatron_weights(checkpoint):
        parameter = waiting.pop(name)
        if parameter.shape != values.shape:
            raise ModelFileError(
                f"{checkpoint.path}: parameter {name} has shape {tuple(parameter.shape)}, "
                f"the file gives {values.shape}"
            )
        parameter.data.copy_(torch.from_numpy(values))
    assert not waiting, f"parameters without a tensor in {checkpoint.path}: {sorted(waiting)}"


def _megatron_weights(checkpoint: Checkpoint) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Gives megatron's parameters one by one, by name, each built when it is asked for."""
    read, size = checkpoint.read, checkpoint.hyperparameters
    yield "embedding.word_embeddings.weight", read("model.embed_tokens.weight")
    for layer in range(size.num_layers):
        source, target = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        yield target + "input_layernorm.weight", read(source + "input_layernorm.weight")
        yield target + "self_attention.linear_qkv.weight", _query_key_value(checkpoint, source + "self_attn.")
        yield target + "self_attention.linear_proj.weight", read(source + "self_attn.o_proj.weight")
        yield target + "pre_mlp_layernorm.weight", read(source + "post_attention_layernorm.weight")
        gate, up = read(source + "mlp.gate_proj.weight"), read(source + "mlp.up_proj.weight")
        yield target + "mlp.linear_fc1.weight", np.concatenate([gate, up])
        yield target + "mlp.linear_fc2.weight", read(source + "mlp.down_proj.weight")
    yield "decoder.final_layernorm.weight", read("model.norm.weight")
    if not size.is_tied:
        yield "output_layer.weight", read("lm_head.weight")


def _query_key_value(checkpoint: Checkpoint, prefix: str) -> NDArray[np.float32]:
    """Gives the joint projection: KV head by KV head its query heads' rows, its key's, its value's."""
    size = checkpoint.hyperparameters
    by_kv_head = [
        checkpoint.read(f"{prefix}{name}_proj.weight").reshape(size.num_kv_heads, -1, size.hidden_size)
        for name in ("q", "k", "v")
    ]
    return np.concatenate(by_kv_head, axis=1).reshape(-1, size.hidden_size)
