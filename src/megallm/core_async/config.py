"""The engine's limits, derived once from InferenceConfig, the model's shape and the free memory.

Reads megatron's config by attribute, so that any version's InferenceConfig will do; imports
neither megatron nor torch.
"""

import logging
from enum import Enum
from typing import Literal, Protocol, Self, TypedDict

from msgspec import Struct

log = logging.getLogger(__name__)

GIB = 1 << 30


class InferenceSettings(Protocol):
    """The fields of megatron-core's InferenceConfig that every version has and the limits come from."""

    @property
    def block_size_tokens(self) -> int: ...
    @property
    def buffer_size_gb(self) -> float: ...
    @property
    def max_requests(self) -> int | None: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def max_sequence_length(self) -> int: ...
    @property
    def enable_chunked_prefill(self) -> bool: ...
    @property
    def enable_prefix_caching(self) -> bool: ...
    @property
    def prefix_caching_eviction_policy(self) -> Enum: ...
    @property
    def paused_buffer_size_gb(self) -> float | None: ...
    @property
    def kv_cache_management_mode(self) -> Enum: ...
    @property
    def logprobs_mode(self) -> str: ...
    @property
    def track_generated_token_events(self) -> bool: ...
    @property
    def track_paused_request_events(self) -> bool: ...


class ModelLimits(Struct, frozen=True):
    """What of the model and its device the limits depend on, for one rank."""

    cache_bytes_per_token: int
    """Bytes of keys and values one token takes, over all layers."""
    vocab_size: int
    device_type: str
    """"cpu" or "cuda"."""
    max_positions: int | None = None
    """Where positions are a learned table: its length."""
    free_bytes: int | None = None
    """Memory free on the device; the cache takes at most half of it. None: no cap."""
    sampling_seed: int = 42


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Every limit of one engine; nothing in the engine reads InferenceConfig after this."""

    block_size: int
    num_blocks: int
    max_requests: int
    """Rows of the batch."""
    max_tokens: int
    """Tokens computed in one step."""
    max_sequence_length: int
    """Prompt and output of one request."""
    max_waiting: int = 1_000_000
    """Requests that may queue; more are refused as EngineBusy."""
    chunks_prompts: bool = False
    shares_prefixes: bool = False
    keeps_cached: bool = True
    """Blocks that nobody holds stay in the prefix cache until their room is needed."""
    max_held_blocks: int = 0
    """Blocks that requests may keep which sit out for want of one more."""
    vocab_size: int
    sampling_seed: int = 42
    kv_mode: Literal["persist", "offload", "recompute"] = "persist"
    """What suspend does with the KV cache."""
    processes_log_probs: bool = False
    """Log-probs are of the logits after penalties, temperature, top-k and top-p, not of the model's."""
    tracks_tokens: bool = False
    """Results carry an event for each token."""
    tracks_pauses: bool = False
    """Results carry an event for each step that a request sat out for want of a block."""
    attention_backend: str = "auto"
    batch_invariant: bool = False
    """Log-probs of generated tokens are equal to the bit to those of scoring the text."""
    num_graphs: int | None = None
    """Sizes of decode steps, and of mixed ones, that are captured as CUDA graphs at most; 0 is none, and
    every step runs op by op; None is as many as were measured to pay: `num_cuda_graphs`, whose -1 is None."""
    num_mixed_graphs: int | None = None
    """The same for steps that are not of decode rows alone: `cuda_graph_mixed_prefill_count`, whose default,
    16, counts as not set, and 0 where `use_cuda_graphs_for_non_decode_steps` is False."""
    max_graph_tokens: int | None = None
    """Tokens of the largest mixed step that is captured: `max_tokens` where `cuda_graph_all_prefills`, else
    `cuda_graph_max_tokens`, whose default, 512, counts as not set: None is as many as pay with the model's
    layers, at least 4,096 (see device/graph_sizes.py)."""
    spaces_graphs_evenly: bool = False
    """Sizes are at even distances where `num_graphs` bounds them, not each half of the next:
    `cuda_graph_sizing_distribution`."""
    routing_policy: Literal["longest_prefix", "first_prefix_block", "load_balanced"] = "load_balanced"
    """How requests go to the replicas of the model, see plan/routing.py; without prefix cache by load."""
    routing_alpha: float = 0.5
    """The weight of a prefix beside the load, 0 to 1."""

    @classmethod
    def derive(
        cls,
        settings: InferenceSettings,
        model: ModelLimits,
        *,
        attention_backend: str = "auto",
        batch_invariant: bool = False,
    ) -> Self:
        """Gives the limits for a model; what was lowered to fit is logged.

        Raises: ValueError naming field, value and range.
        """
        block_size = _at_least("block_size_tokens", settings.block_size_tokens, 1)
        # a stage of a pipeline may be without attention: how many blocks there are, the other stages say
        bytes_per_block = max(model.cache_bytes_per_token, 1) * block_size
        num_blocks = _num_blocks(settings.buffer_size_gb, bytes_per_block, model.free_bytes)
        max_requests, max_tokens = _step_bounds(settings, model, num_blocks)
        return cls(
            block_size=block_size,
            num_blocks=num_blocks,
            max_requests=max_requests,
            max_tokens=max_tokens,
            max_sequence_length=_sequence_bound(settings, model, num_blocks * block_size),
            chunks_prompts=settings.enable_chunked_prefill,
            shares_prefixes=settings.enable_prefix_caching,
            keeps_cached=_value_of(settings.prefix_caching_eviction_policy) == "lru",
            max_held_blocks=int((settings.paused_buffer_size_gb or 0) * GIB) // bytes_per_block,
            vocab_size=model.vocab_size,
            sampling_seed=model.sampling_seed,
            kv_mode=_kv_mode(settings),
            tracks_tokens=settings.track_generated_token_events,
            tracks_pauses=settings.track_paused_request_events,
            processes_log_probs=_processes_log_probs(settings),
            attention_backend=attention_backend,
            batch_invariant=batch_invariant,
            routing_policy=_routing_policy(settings),
            routing_alpha=getattr(settings, "prefix_caching_routing_alpha", 0.5),
            **_graph_limits(settings, max_tokens),
        )


def check_epoch(epoch: object) -> int:
    """Gives the number of some weights. Raises: ValueError naming value and range."""
    if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
        raise ValueError(f"epoch is {epoch!r}; it must be an integer of at least 0")
    return epoch


def _at_least(field: str, value: int, least: int) -> int:
    if value < least:
        raise ValueError(f"InferenceConfig.{field} is {value}; it must be at least {least}")
    return value


def _num_blocks(buffer_gb: float, bytes_per_block: int, free_bytes: int | None) -> int:
    if buffer_gb <= 0:
        raise ValueError(f"InferenceConfig.buffer_size_gb is {buffer_gb}; it must be above 0")
    wanted = int(buffer_gb * GIB)
    allowed = wanted if free_bytes is None else min(wanted, free_bytes // 2)
    if allowed < wanted:
        log.info(
            "KV cache: %.2f GiB instead of buffer_size_gb=%g: half of the %.2f GiB that are free",
            allowed / GIB,
            buffer_gb,
            (free_bytes or 0) / GIB,
        )
    num_blocks = allowed // bytes_per_block
    if num_blocks < 1:
        raise ValueError(
            f"InferenceConfig.buffer_size_gb is {buffer_gb} and one block takes {bytes_per_block / GIB:.4f}"
            " GiB; raise buffer_size_gb or lower block_size_tokens"
        )
    return num_blocks


def _step_bounds(settings: InferenceSettings, model: ModelLimits, num_blocks: int) -> tuple[int, int]:
    """Gives (max_requests, max_tokens): a step must hold one token of every running request."""
    max_tokens = settings.max_tokens
    if max_tokens is None:
        max_tokens = 16_384 if model.device_type == "cuda" else 2_048
    _at_least("max_tokens", max_tokens, 1)
    if settings.max_requests is None:
        return min(num_blocks, max_tokens, 512), max_tokens
    max_requests = _at_least("max_requests", settings.max_requests, 1)
    if max_requests > max_tokens:
        if settings.max_tokens is None:
            return max_requests, max_requests
        raise ValueError(
            f"InferenceConfig.max_requests is {max_requests} and max_tokens is {max_tokens}: a step must hold"
            " one token of each request; raise max_tokens or lower max_requests"
        )
    return max_requests, max_tokens


def _sequence_bound(settings: InferenceSettings, model: ModelLimits, cache_tokens: int) -> int:
    bound = _at_least("max_sequence_length", settings.max_sequence_length, 1)
    if model.max_positions is not None and bound > model.max_positions:
        log.info(
            "max_sequence_length: %d, the model's table of positions, instead of %d",
            model.max_positions,
            bound,
        )
        bound = model.max_positions
    if bound > cache_tokens:
        log.info(
            "max_sequence_length: %d, all that the cache holds, instead of %d; raise buffer_size_gb for more",
            cache_tokens,
            bound,
        )
        bound = cache_tokens
    return bound


def _kv_mode(settings: InferenceSettings) -> Literal["persist", "offload", "recompute"]:
    mode = settings.kv_cache_management_mode
    value = _value_of(mode)
    if value not in ("persist", "offload", "recompute"):
        raise ValueError(
            f"InferenceConfig.kv_cache_management_mode is {mode!r}; it must be persist, offload or recompute"
        )
    return value


def _routing_policy(
    settings: InferenceSettings,
) -> Literal["longest_prefix", "first_prefix_block", "load_balanced"]:
    policy = getattr(settings, "prefix_caching_coordinator_policy", "load_balanced")
    value = _value_of(policy)
    if value not in ("longest_prefix", "first_prefix_block", "load_balanced"):
        raise ValueError(
            f"InferenceConfig.prefix_caching_coordinator_policy is {policy!r}; it must be longest_prefix,"
            " first_prefix_block or load_balanced"
        )
    return value if settings.enable_prefix_caching else "load_balanced"


def _processes_log_probs(settings: InferenceSettings) -> bool:
    mode = settings.logprobs_mode
    if mode not in ("raw_logprobs", "processed_logprobs"):
        raise ValueError(
            f"InferenceConfig.logprobs_mode is {mode!r}; it must be raw_logprobs or processed_logprobs"
        )
    return mode == "processed_logprobs"


class _GraphLimits(TypedDict):
    num_graphs: int | None
    num_mixed_graphs: int | None
    max_graph_tokens: int | None
    spaces_graphs_evenly: bool


def _graph_limits(settings: InferenceSettings, max_tokens: int) -> _GraphLimits:
    """Reads what a version of megatron-core has of the fields of CUDA graphs."""
    num_graphs: int | None = getattr(settings, "num_cuda_graphs", None)
    if num_graphs is not None and num_graphs < -1:
        raise ValueError(
            f"InferenceConfig.num_cuda_graphs is {num_graphs}; it must be at least -1, as many as pay"
        )
    num_mixed: int | None = getattr(settings, "cuda_graph_mixed_prefill_count", _MIXED_GRAPHS)
    if not getattr(settings, "use_cuda_graphs_for_non_decode_steps", True):
        num_mixed = 0
    largest: int = getattr(settings, "cuda_graph_max_tokens", _GRAPH_TOKENS)
    spacing = _value_of(getattr(settings, "cuda_graph_sizing_distribution", "exponential"))
    takes_all = getattr(settings, "cuda_graph_all_prefills", False)
    return {
        "num_graphs": None if num_graphs == -1 else num_graphs,
        "num_mixed_graphs": None
        if num_mixed == _MIXED_GRAPHS
        else _at_least("cuda_graph_mixed_prefill_count", num_mixed or 0, 0),
        "max_graph_tokens": max_tokens
        if takes_all
        else None
        if largest == _GRAPH_TOKENS
        else _at_least("cuda_graph_max_tokens", largest, 1),
        "spaces_graphs_evenly": spacing == "linear",
    }


_MIXED_GRAPHS, _GRAPH_TOKENS = 16, 512
"""Upstream's defaults."""


def _value_of(setting: Enum | str) -> str:
    """Gives the value of one of megatron-core's enums, in small letters; plain strings are taken too."""
    return str(getattr(setting, "value", setting)).lower()
