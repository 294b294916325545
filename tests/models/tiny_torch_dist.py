"""Writes tiny runs in megatron's distributed format, with megatron's own dist_checkpointing."""
# megatron-core is untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from megatron.core import dist_checkpointing

from megallm.models.checkpoint import Hyperparameters
from megallm.models.gpt import random_gpt
from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron
from tests.models.tiny_gguf import TINY
from tests.models.tiny_hf import write_tokenizer

SIZE = msgspec.structs.replace(TINY, is_tied=False, has_qk_norm=True)
ARGUMENTS: dict[str, Any] = {  # Any: as a training run has them
    "num_layers": SIZE.num_layers,
    "hidden_size": SIZE.hidden_size,
    "num_attention_heads": SIZE.num_heads,
    "group_query_attention": True,
    "num_query_groups": SIZE.num_kv_heads,
    "kv_channels": SIZE.head_dim,
    "ffn_hidden_size": SIZE.ffn_size,
    "padded_vocab_size": SIZE.vocab_size,
    "max_position_embeddings": SIZE.max_positions,
    "rotary_base": 10_000,
    "norm_epsilon": SIZE.norm_epsilon,
    "untie_embeddings_and_output_weights": True,
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "qk_layernorm": True,
}


def save_run(
    run: Path,
    size: Hyperparameters = SIZE,
    *,
    arguments: dict[str, Any] = ARGUMENTS,
    stored_as: Callable[[str], str] = str,
) -> Any:  # Any: megatron's model
    """Writes a run with one iteration of a random bfloat16 model, saved by one rank; gives the model.

    `stored_as` gives the name that a tensor is stored under, from the one that megatron's local layers give.
    """
    write_tokenizer(run, size.vocab_size)
    iteration = run / "iter_0000005"
    iteration.mkdir()
    cpu = torch.device("cpu")
    with (
        quiet_megatron(),
        # megatron asks for CUDA while it saves
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.cuda, "current_device", return_value=cpu),
    ):
        ensure_process_groups()
        kind = "gpt" if size.layer_kinds is None else "hybrid"
        model = random_gpt(size, dtype=torch.bfloat16, device=cpu, model_class=kind)
        tensors = model.sharded_state_dict()
        for tensor in tensors.values():
            tensor.key = stored_as(tensor.key)
        given = Namespace(**arguments, tokenizer_model=str(run))
        state = {"model": tensors, "args": given, "iteration": 5}
        dist_checkpointing.save(state, str(iteration), async_strategy="mcore")
    (run / "latest_checkpointed_iteration.txt").write_text("5\n", encoding="utf-8")
    return model
