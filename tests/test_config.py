"""The engine's limits, from every combination of settings, model and free memory."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.inference.config import InferenceConfig

from megallm.core_async.config import GIB, EngineConfig, ModelLimits

KIB = 1024


def model_limits(**changes: Any) -> ModelLimits:  # Any: fields of several types
    """Gives a model that takes a KiB a token, on a CPU."""
    fields: dict[str, Any] = {
        "cache_bytes_per_token": KIB,
        "vocab_size": 100,
        "device_type": "cpu",
        **changes,
    }
    return ModelLimits(**fields)


def derive(model: ModelLimits | None = None, **changes: Any) -> EngineConfig:  # Any: fields of several types
    """Gives the limits for some settings, with a small cache where none is asked for."""
    fields: dict[str, Any] = {"buffer_size_gb": 0.25, **changes}
    return EngineConfig.derive(InferenceConfig(**fields), model_limits() if model is None else model)


def test_the_cache_is_as_large_as_asked_for_down_to_fractions_of_a_gib() -> None:
    """Small models and tests live on megabytes; a field in whole GiB would be useless to them."""
    config = derive(buffer_size_gb=1.5 / KIB, block_size_tokens=16)
    assert (config.block_size, config.num_blocks) == (16, 96)


def test_the_cache_takes_at_most_half_of_what_is_free_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The default of 20 GiB would have a laptop killed for memory."""
    with caplog.at_level(logging.INFO):
        config = derive(model_limits(free_bytes=GIB), buffer_size_gb=20.0, block_size_tokens=256)
    assert config.num_blocks == GIB // 2 // (256 * KIB)
    assert (
        "KV cache: 0.50 GiB instead of buffer_size_gb=20: half of the 1.00 GiB that are free" in caplog.text
    )


def test_a_cache_that_fits_is_not_lowered_and_not_remarked_on(caplog: pytest.LogCaptureFixture) -> None:
    """A log line in every healthy start would teach users to skip it."""
    with caplog.at_level(logging.INFO):
        config = derive(model_limits(free_bytes=GIB), buffer_size_gb=0.5, max_sequence_length=100)
    assert config.num_blocks == GIB // 2 // (256 * KIB)
    assert caplog.text == ""


def test_a_stage_that_keeps_nothing_lets_others_decide() -> None:
    """A stage of a pipeline may be without attention; the least blocks of any stage hold for all."""
    assert derive(model_limits(cache_bytes_per_token=0)).num_blocks > derive().num_blocks


@pytest.mark.parametrize(("device", "max_tokens"), [("cpu", 2_048), ("cuda", 16_384)])
def test_a_step_is_as_large_as_suits_the_device(device: str, max_tokens: int) -> None:
    """A CPU's step of 16,384 tokens would take half a minute, in which no stream says a word."""
    assert derive(model_limits(device_type=device)).max_tokens == max_tokens


def test_the_batch_is_bounded_by_blocks_by_the_step_and_by_512() -> None:
    """Each running request needs a block and a token of the step at the least."""
    assert derive(buffer_size_gb=64 / KIB, block_size_tokens=1024).max_requests == 64
    assert derive(buffer_size_gb=64 / KIB, block_size_tokens=1, max_tokens=40).max_requests == 40
    assert derive(buffer_size_gb=1.0, block_size_tokens=16).max_requests == 512


def test_asking_for_many_requests_raises_the_default_step_to_hold_them() -> None:
    """Only one of the two was chosen by the user; that one counts."""
    config = derive(max_requests=4_000)
    assert (config.max_requests, config.max_tokens) == (4_000, 4_000)


def test_the_context_is_what_cache_and_positions_hold(caplog: pytest.LogCaptureFixture) -> None:
    """A request that could never get its blocks would wait for ever."""
    with caplog.at_level(logging.INFO):
        config = derive(buffer_size_gb=64 / KIB, block_size_tokens=1024, max_sequence_length=100_000)
        assert config.max_sequence_length == 65_536
        assert "max_sequence_length: 65536, all that the cache holds, instead of 100000" in caplog.text
        config = derive(model_limits(max_positions=512), max_sequence_length=2_560)
        assert config.max_sequence_length == 512
        assert "max_sequence_length: 512, the model's table of positions, instead of 2560" in caplog.text


def test_what_the_model_says_is_taken_over() -> None:
    """The vocabulary bounds token ids, the seed makes a script's unseeded runs repeat."""
    config = EngineConfig.derive(
        InferenceConfig(buffer_size_gb=1, enable_chunked_prefill=True),
        model_limits(vocab_size=151_936, sampling_seed=7),
        attention_backend="sdpa",
    )
    assert (config.vocab_size, config.sampling_seed) == (151_936, 7)
    assert (config.chunks_prompts, config.attention_backend) == (True, "sdpa")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size_tokens": 0}, "block_size_tokens is 0; it must be at least 1"),
        ({"buffer_size_gb": 0.0}, "buffer_size_gb is 0.0; it must be above 0"),
        ({"buffer_size_gb": -1.0}, "buffer_size_gb is -1.0; it must be above 0"),
        ({"max_requests": 0}, "max_requests is 0; it must be at least 1"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_sequence_length": -5}, "max_sequence_length is -5; it must be at least 1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    """Whoever set the field has to see which, what it was and what it may be."""
    with pytest.raises(ValueError, match=message):
        derive(**fields)


def test_a_cache_too_small_for_one_block_says_what_to_change() -> None:
    """It would otherwise show as requests that never run."""
    with pytest.raises(
        ValueError, match=r"one block takes .* raise buffer_size_gb or lower block_size_tokens"
    ):
        derive(buffer_size_gb=1 / GIB)


def test_more_requests_than_a_step_has_tokens_is_refused() -> None:
    """Every running request computes a token a step; both numbers are the user's, so neither is changed."""
    with pytest.raises(
        ValueError, match=r"max_requests is 32 and max_tokens is 16: .* raise max_tokens or lower"
    ):
        derive(max_requests=32, max_tokens=16)


@given(
    buffer_mib=st.floats(0.1, 4_000),
    block_size=st.integers(1, 1024),
    max_requests=st.none() | st.integers(1, 5_000),
    max_tokens=st.none() | st.integers(1, 50_000),
    max_sequence_length=st.integers(1, 200_000),
    free_bytes=st.none() | st.integers(1, 100 * GIB),
    bytes_per_token=st.integers(1, 1 << 20),
)
def test_whatever_is_accepted_is_consistent(  # noqa: PLR0917 - Hypothesis passes them by name
    buffer_mib: float,
    block_size: int,
    max_requests: int | None,
    max_tokens: int | None,
    max_sequence_length: int,
    free_bytes: int | None,
    bytes_per_token: int,
) -> None:
    """Scheduler and pool rely on these; a combination that breaks one would hang or crash them in a step."""
    model = model_limits(cache_bytes_per_token=bytes_per_token, free_bytes=free_bytes)
    try:
        config = derive(
            model,
            buffer_size_gb=buffer_mib / KIB,
            block_size_tokens=block_size,
            max_requests=max_requests,
            max_tokens=max_tokens,
            max_sequence_length=max_sequence_length,
        )
    except ValueError as error:
        assert "InferenceConfig." in str(error)  # noqa: PT017 - most settings are accepted
        return
    cache_bytes = config.num_blocks * block_size * bytes_per_token
    assert 0 < cache_bytes <= buffer_mib / KIB * GIB
    assert free_bytes is None or cache_bytes <= free_bytes / 2
    assert 1 <= config.max_requests <= config.max_tokens
    assert 1 <= config.max_sequence_length <= config.num_blocks * block_size
    assert max_requests is None or config.max_requests == max_requests
    assert max_tokens is None or config.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (None, None, None, False)),
        ({"num_cuda_graphs": -1}, (None, None, None, False)),
        ({"num_cuda_graphs": 0}, (0, None, None, False)),
        ({"num_cuda_graphs": 5, "cuda_graph_mixed_prefill_count": 3}, (5, 3, None, False)),
        ({"cuda_graph_mixed_prefill_count": 17}, (None, 17, None, False)),
        ({"cuda_graph_mixed_prefill_count": None}, (None, 0, None, False)),
        ({"use_cuda_graphs_for_non_decode_steps": False}, (None, 0, None, False)),
        ({"cuda_graph_max_tokens": 1024}, (None, None, 1024, False)),
        ({"cuda_graph_all_prefills": True, "max_tokens": 3000}, (None, None, 3000, False)),
        ({"cuda_graph_sizing_distribution": "linear"}, (None, None, None, True)),
    ],
)
def test_graphs_are_what_the_fields_of_the_config_say(
    settings: dict[str, Any], expected: tuple[int | None, int | None, int | None, bool]
) -> None:
    """A field that is taken and ignored is worse than one that is refused."""
    config = derive(**settings)
    assert (
        config.num_graphs,
        config.num_mixed_graphs,
        config.max_graph_tokens,
        config.spaces_graphs_evenly,
    ) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_cuda_graphs", -2), ("cuda_graph_mixed_prefill_count", -1), ("cuda_graph_max_tokens", 0)],
)
def test_impossible_numbers_of_graphs_are_refused(field: str, value: int) -> None:
    """Named, like every other field."""
    changes: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=field):
        derive(**changes)


def test_older_configs_without_the_fields_get_ours() -> None:
    """Fields are read by name, so that any version's config will do."""
    kept = {
        name: value for name, value in vars(InferenceConfig(buffer_size_gb=1)).items() if "graph" not in name
    }
    older: Any = SimpleNamespace(**kept)  # Any: of a class of its own
    config = EngineConfig.derive(older, model_limits())
    assert (config.num_graphs, config.num_mixed_graphs, config.max_graph_tokens) == (None, None, None)
