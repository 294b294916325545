"""Small random models, whole or one rank's part of them in any layout: the same weights either way."""

import zlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from tests.device.models import Megatron, gpt
from tests.ranks.split_model import random_part

NUM_LAYERS = 3
NUM_KV_HEADS = 4
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class Layout(msgspec.Struct, frozen=True):
    """How a model is spread over ranks."""

    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    stages: str = "Ett|tL"
    """megatron's layout of two stages; this one is uneven."""

    @property
    def num_ranks(self) -> int:
        """Processes that it takes."""
        return self.tp * self.pp

    @property
    def most_layers(self) -> int:
        """Layers of the stage with the most."""
        return NUM_LAYERS if self.pp == 1 else max(stage.count("t") for stage in self.stages.split("|"))


WHOLE = Layout()


def staged_gpt(layout: Layout = WHOLE, *, has_experts: bool = False, is_tied: bool = False) -> Megatron:
    """Gives this rank's part of a GQA model, as megatron's groups say which that is."""
    groups: Any = parallel_state  # Any: megatron is untyped
    options: dict[str, Any] = {"share_embeddings_and_output_weights": is_tied}
    changes: dict[str, Any] = {}
    if layout.pp > 1:
        options |= {
            "pre_process": groups.is_pipeline_first_stage(),
            "post_process": groups.is_pipeline_last_stage(),
        }
        changes |= {
            "pipeline_model_parallel_size": layout.pp,
            "pipeline_model_parallel_layout": layout.stages,
            "pipeline_dtype": torch.float32,
        }
    if has_experts:
        changes |= EXPERTS
    with cuda_is_cpu():
        model = gpt(
            model=options,
            num_layers=NUM_LAYERS,
            tensor_model_parallel_size=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            num_attention_heads=8,
            num_query_groups=NUM_KV_HEADS,
            **changes,
        )
    rank: int = groups.get_tensor_model_parallel_rank() if layout.tp > 1 else 0
    for name, parameter in model.named_parameters():
        whole = _name_in_whole(model, name)
        if is_tied and whole == OUTPUT:
            whole = EMBEDDING
        generator = torch.Generator().manual_seed(zlib.crc32(whole.encode()))
        parameter.data.copy_(random_part(whole, parameter, rank, layout.tp, generator))
    return model


EXPERTS: dict[str, Any] = {
    "spec": {"num_experts": 4, "moe_grouped_gemm": False},
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
    "moe_grouped_gemm": False,
}


def _name_in_whole(model: Megatron, name: str) -> str:
    """Gives a parameter's name in the whole model: a stage counts its own layers from 0."""
    match name.split("."):
        case ["decoder", "layers", index, *rest]:
            number = model.decoder.layers[int(index)].layer_number - 1
            return ".".join(["decoder", "layers", str(number), *rest])
        case _:
            return name


@contextmanager
def cuda_is_cpu() -> Generator[None]:
    """Lets megatron build what it builds on CUDA alone: tied weights of two stages, norms beside SP."""

    def norm(
        _kind: object, config: Megatron, hidden_size: int, eps: float = 1e-5, **_options: object
    ) -> nn.Module:
        return nn.RMSNorm(hidden_size, eps)

    with (
        mock.patch.object(torch.Tensor, "cuda", torch.Tensor.cpu),
        mock.patch.object(WrappedTorchNorm, "__new__", norm),
    ):
        yield
