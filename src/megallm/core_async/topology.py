"""Which ranks run a model together, and what each of them holds: megatron's process groups, read once.

Reads `InferenceConfig.pg_collection` where it names a group, else megatron's parallel_state.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig
from msgspec import Struct
from torch import distributed

from megallm.core_async.device.model_options import device_of
from megallm.core_async.device.rank_group import RankGroup

type Group = Any  # a ProcessGroup, or what a test puts in its place; megatron's getters are untyped


class Topology(Struct, frozen=True):
    """A model's ranks, as one of them sees them."""

    ranks: RankGroup | None = None
    """Those that the model is split over, stages and all; None where this rank has all of it."""
    replicas: RankGroup | None = None
    """Those that hold the same part of another replica each; None where there is one replica."""
    stages: Group | None = None
    """Those that hold the other stages of a pipeline; None where there is one stage."""
    shares_experts: bool = False
    """Whether replicas hold a part of the experts each, so that every step is one of all of them."""

    @property
    def leads(self) -> bool:
        """Whether this rank runs the engine that its replica's other ranks follow."""
        return self.ranks is None or not self.ranks.place


def topology_of(model: object, settings: InferenceConfig) -> Topology:
    """Gives the ranks of a model; of what is no model too, so that the others can be told."""
    get: Any = parallel_state  # Any: megatron is untyped
    device = device_of(model if isinstance(model, torch.nn.Module) else torch.nn.Module())
    model_group = _group(settings, "mp", get.get_model_parallel_group)
    replica_group = _group(settings, "dp", get.get_data_parallel_group)
    experts = _group(
        settings, "tp_ep", lambda: get.get_expert_tensor_and_model_parallel_group(check_initialized=False)
    )
    own = [] if model_group is None else distributed.get_process_group_ranks(model_group)
    holders = [] if experts is None else distributed.get_process_group_ranks(experts)
    has_experts = bool(getattr(getattr(model, "config", None), "num_moe_experts", None))
    return Topology(
        ranks=_several(model_group, device),
        replicas=_several(replica_group, device),
        stages=_if_several(_group(settings, "pp", get.get_pipeline_model_parallel_group)),
        shares_experts=has_experts and len(holders) > 1 and not set(holders) <= set(own),
    )


def _group(settings: InferenceConfig, name: str, otherwise: Callable[[], Group]) -> Group | None:
    group: Group = getattr(getattr(settings, "pg_collection", None), name, None)
    if group is None and distributed.is_initialized() and parallel_state.is_initialized():
        return otherwise()
    return group


def _if_several(group: Group | None) -> Group | None:
    return None if group is None or distributed.get_world_size(group) == 1 else group


def _several(group: Group | None, device: torch.device) -> RankGroup | None:
    several = _if_several(group)
    return None if several is None else RankGroup(several, device)
