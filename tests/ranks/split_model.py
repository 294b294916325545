"""A small random GQA model, whole or one tensor-parallel rank's part of it: the same weights either way."""

import torch
from torch import Tensor

from tests.device.models import Megatron, gpt

SPLIT_BY_ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight")
SPLIT_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
GATED = "linear_fc1.weight"


def split_gpt(rank: int = 0, num_ranks: int = 1) -> Megatron:
    """Gives the part of the model that one of `num_ranks` tensor-parallel ranks holds."""
    model = gpt(
        tensor_model_parallel_size=num_ranks,
        num_attention_heads=8,
        num_query_groups=4,
        model={"position_embedding_type": "rope", "rotary_base": 10_000},
    )
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(random_part(name, parameter, rank, num_ranks, generator))
    return model


def random_part(name: str, part: Tensor, rank: int, num_ranks: int, generator: torch.Generator) -> Tensor:
    """Gives one rank's part, of the shape of `part`, of a parameter whose whole is drawn."""
    return _part(name, _random(name, part, num_ranks, generator), rank, num_ranks)


def _random(name: str, part: Tensor, num_ranks: int, generator: torch.Generator) -> Tensor:
    shape = list(part.shape)
    if name.endswith((*SPLIT_BY_ROWS, GATED)):
        shape[0] *= num_ranks
    elif name.endswith(SPLIT_BY_COLUMNS):
        shape[1] *= num_ranks
    whole = torch.empty(shape)
    if whole.dim() > 1:
        return whole.normal_(0, 0.15, generator=generator)
    return whole.uniform_(0.5, 1.5, generator=generator)


def _part(name: str, whole: Tensor, rank: int, num_ranks: int) -> Tensor:
    if name.endswith(GATED):
        gate, up = whole.chunk(2)
        return torch.cat([gate.chunk(num_ranks)[rank], up.chunk(num_ranks)[rank]])
    if name.endswith(SPLIT_BY_ROWS):
        return whole.chunk(num_ranks)[rank]
    if name.endswith(SPLIT_BY_COLUMNS):
        return whole.chunk(num_ranks, dim=1)[rank]
    return whole
