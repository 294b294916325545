"""Checks a constructor's arguments and makes the parts of an engine; starts nothing."""

import dataclasses
import logging
import weakref
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig
from msgspec import Struct
from torch import distributed

from megallm.core_async.config import EngineConfig, ModelLimits
from megallm.core_async.device.layer_shapes import ModelShape
from megallm.core_async.device.memory import free_bytes
from megallm.core_async.device.model import ModelHook
from megallm.core_async.device.pipeline import check_stage, pipeline_of
from megallm.core_async.device.runner import TorchRunner
from megallm.core_async.engine import Engine
from megallm.core_async.errors import UnsupportedModelError
from megallm.core_async.intake import Intake
from megallm.core_async.matchers import Matchers
from megallm.core_async.messages import EngineStats
from megallm.core_async.ranks.agree import agreed, made_by_all
from megallm.core_async.ranks.assembly import Role, assembled
from megallm.core_async.ranks.calls import Calls
from megallm.core_async.step_log import StepLog
from megallm.core_async.tokenizers import TokenizerAdapter
from megallm.core_async.topology import Topology, topology_of
from megallm.core_async.transport.addresses import check_host

log = logging.getLogger(__name__)

HONOURED = frozenset(
    {
        "block_size_tokens",
        "buffer_size_gb",
        "max_requests",
        "max_tokens",
        "max_sequence_length",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "prefix_caching_eviction_policy",
        "paused_buffer_size_gb",
        "prefix_caching_coordinator_policy",
        "prefix_caching_routing_alpha",
        "kv_cache_management_mode",
        "logprobs_mode",
        "track_generated_token_events",
        "track_paused_request_events",
        "materialize_only_last_token_logits",
        "metrics_writer",
        "logging_step_interval",
        "offset_sampling_seed_by_dp_rank",
        "pg_collection",
        "num_cuda_graphs",
        "cuda_graph_mixed_prefill_count",
        "cuda_graph_sizing_distribution",
        "use_cuda_graphs_for_non_decode_steps",
        "cuda_graph_all_prefills",
        "cuda_graph_max_tokens",
        "verbose",
    }
)
"""Fields of InferenceConfig that mean something here; materialize_only_last_token_logits is a hint."""


class Parts(Struct):
    """An engine that has not started, and what turns calls into its requests."""

    engine: Engine
    intake: Intake
    tokenizer: TokenizerAdapter
    calls: Calls
    """The lifecycle, as every rank's program calls it."""


def build(  # the constructor's arguments, which are the public API
    *,
    model: torch.nn.Module,
    tokenizer: Any,  # see TokenizerAdapter
    inference_config: InferenceConfig | None,
    use_coordinator: bool,
    coordinator_host: str | None,
    coordinator_port: int | None,
    inference_wrapper_cls: type | None,
    attention_backend: str,
    batch_invariant: bool,
) -> Parts:
    """Checks everything and gives the parts; the ranks of a model return or raise together.

    Raises: ValueError and TypeError naming argument, value and remedy; UnsupportedModelError; RankLostError
    naming another rank that raised.
    """
    if not use_coordinator and (coordinator_host is not None or coordinator_port is not None):
        raise ValueError("coordinator_host/port require use_coordinator=True")
    check_host(coordinator_host)
    settings = InferenceConfig() if inference_config is None else inference_config
    topology = topology_of(model, settings)
    role = Role(
        ranks=topology.ranks,
        replicas=topology.replicas if use_coordinator else None,
        shares_experts=topology.shares_experts,
        is_direct=not use_coordinator,
        host=coordinator_host,
        port=coordinator_port,
    )
    groups = [group for group in (role.ranks, role.replicas) if group is not None]

    def limits() -> EngineConfig:
        _check_model(model, use_coordinator=use_coordinator)
        _check_wrapper(inference_wrapper_cls)
        _warn_of_unused(settings)
        hook = ModelHook(model)
        _check_part(model, hook, topology, is_direct=role.is_direct)
        return EngineConfig.derive(
            settings,
            _limits_of(model, hook.shape, settings),
            attention_backend=attention_backend,
            batch_invariant=batch_invariant,
        )

    config = agreed(groups, limits)

    def parts() -> Parts:
        adapter = TokenizerAdapter(tokenizer)
        matchers = Matchers(adapter, config.vocab_size)
        runner = TorchRunner(model, config, matchers, pipeline_of(model, topology.stages))
        engine, calls = assembled(config, runner, adapter, role)
        if settings.logging_step_interval:
            _log_steps(engine, settings)
        intake = Intake(config, adapter, engine.next_request_id, matchers)
        return Parts(engine=engine, intake=intake, tokenizer=adapter, calls=calls)

    return made_by_all(groups, parts)


def _check_model(model: object, *, use_coordinator: bool) -> None:
    _refuse_chunks(model)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a megatron-core model, a torch.nn.Module")
    training = next((type(module).__name__ for module in model.modules() if module.training), None)
    if training is not None:
        raise ValueError(f"model is in training mode (its {training}); call model.eval() first")
    expert_ranks = getattr(getattr(model, "config", None), "expert_model_parallel_size", 1)
    if not use_coordinator and expert_ranks > 1:
        raise ValueError(
            f"use_coordinator=False and expert_model_parallel_size > 1 (it is {expert_ranks}): direct mode"
            " can't keep expert-parallel ranks in step; use the coordinator"
        )


def _refuse_chunks(model: Any) -> None:  # Any: the caller's own
    """Refuses what megatron builds for a virtual pipeline."""
    if type(model) in (list, torch.nn.ModuleList) and len(model) > 1:
        raise UnsupportedModelError(
            f"model is {len(model)} chunks of a virtual pipeline, which the engine does not run; build it"
            " with virtual_pipeline_model_parallel_size=None: one part of the model a rank"
        )


def _check_part(model: torch.nn.Module, hook: ModelHook, topology: Topology, *, is_direct: bool) -> None:
    """Sees that the model's layers and megatron's groups agree: else ranks would wait for each other."""
    if topology.shares_experts and is_direct:
        raise ValueError(
            "use_coordinator=False and experts that replicas hold a part of each: direct mode can't keep"
            " replicas in step; use the coordinator"
        )
    check_stage(model, topology.stages, leads=topology.ranks is not None and topology.leads)
    experts = hook.experts
    if experts.is_spread and not topology.shares_experts:
        raise UnsupportedModelError(
            f"the experts are spread over ranks {list(experts.ranks)}, of which InferenceConfig.pg_collection"
            " knows nothing; give it the model's own tp_ep group"
        )


def _check_wrapper(inference_wrapper_cls: type | None) -> None:
    """Takes megatron's own GPT wrapper, whose work the hook does."""
    if inference_wrapper_cls is not None and inference_wrapper_cls.__name__ != "GPTInferenceWrapper":
        raise NotImplementedError(
            f"inference_wrapper_cls is {inference_wrapper_cls.__name__};"
            " only GPTInferenceWrapper is supported"
        )


def _log_steps(engine: Engine, settings: InferenceConfig) -> None:
    """Makes an engine report every `logging_step_interval` steps.

    Raises: ValueError, TypeError as `StepLog`.
    """
    reporting = weakref.ref(engine)  # which holds what reports of it

    def stats() -> EngineStats:
        reported = reporting()
        return EngineStats() if reported is None else reported.stats()

    fields: Any = settings  # Any: a writer's type is wandb's, which may be missing
    steps = StepLog(settings.logging_step_interval, fields.metrics_writer, stats)
    engine.times.on_result = steps.observe


def _limits_of(model: torch.nn.Module, shape: ModelShape, settings: InferenceConfig) -> ModelLimits:
    per_token = sum(
        layer.num_kv_heads * (layer.head_dim + layer.value_head_dim) * shape.dtype.itemsize
        for layer in shape.attention_layers
    )
    return ModelLimits(
        cache_bytes_per_token=per_token,
        vocab_size=shape.vocab_size,
        device_type=shape.device.type,
        max_positions=shape.max_positions,
        free_bytes=free_bytes(shape.device),
        sampling_seed=_sampling_seed(model.config, settings),
    )


def _sampling_seed(model_config: object, settings: InferenceConfig) -> int:
    """Gives the model's seed; each data-parallel rank has its own, unless the config says otherwise."""
    seed: int = getattr(model_config, "inference_sampling_seed", 42)
    is_offset = getattr(settings, "offset_sampling_seed_by_dp_rank", True)
    if not is_offset or getattr(model_config, "deterministic_mode", False):
        return seed
    group = getattr(settings.pg_collection, "dp", None)
    if group is not None:
        return seed + distributed.get_rank(group)
    is_parallel = distributed.is_initialized() and parallel_state.is_initialized()
    get_rank: Any = parallel_state.get_data_parallel_rank  # Any: megatron is untyped
    return seed + int(get_rank()) if is_parallel else seed


def _warn_of_unused(settings: InferenceConfig) -> None:
    """Names the fields that were set and mean nothing here."""
    unused = [
        field.name
        for field in dataclasses.fields(settings)
        if field.name not in HONOURED
        and field.default is not dataclasses.MISSING
        and getattr(settings, field.name) != field.default
    ]
    if unused:
        log.warning("InferenceConfig: %s set, without effect in this version", ", ".join(unused))
