"""Which sizes of steps are captured."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megallm.core_async.config import EngineConfig
from megallm.core_async.device.graph_sizes import TOKENS, row_sizes, token_sizes
from tests.device.plans import engine_config

SMALL, LARGE = 15_728_640, 218_103_808
"""Weights of a layer of the 0.6B shape and of the 8B shape."""
CLOSE = [*TOKENS, 4_608, 5_120, 6_144, 7_168, 8_192, 9_728, 11_264, 13_312, 15_872, 16_384]


@pytest.mark.parametrize("max_rows", [1, 3, 8, 100, 256, 500])
def test_every_number_of_rows_has_a_graph(max_rows: int) -> None:
    """The largest batch must not fall back to running op by op."""
    sizes = row_sizes(engine_config(max_requests=max_rows))
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows


def test_no_mixed_step_is_captured_that_no_plan_reaches() -> None:
    """Each graph takes time and memory."""
    for weights in (SMALL, LARGE):
        assert token_sizes(engine_config(max_tokens=100), weights) == [32, 64, 100]
        assert token_sizes(engine_config(max_tokens=4_096), weights) == list(TOKENS)


def test_steps_are_captured_for_as_long_as_python_takes_longer_than_the_device() -> None:
    """A layer of the 8B shape is long at 4,096 tokens already, one of the 0.6B shape is not at 16,384."""
    assert token_sizes(engine_config(max_tokens=65_536), LARGE) == list(TOKENS)
    assert token_sizes(engine_config(max_tokens=16_384), SMALL) == CLOSE
    assert token_sizes(engine_config(max_tokens=65_536), SMALL)[-1] == 18_944
    assert token_sizes(engine_config(max_tokens=65_536), 2 * SMALL)[-1] == 9_216
    assert token_sizes(engine_config(max_tokens=65_536), None) == list(TOKENS)


def test_sizes_are_few_however_large_steps_may_be() -> None:
    """Each takes time at the start, and keeps its logits."""
    config = _config(max_tokens=131_072, max_graph_tokens=131_072)
    assert len(token_sizes(config, LARGE)) < 36
    assert token_sizes(_config(max_tokens=131_072), 1) == token_sizes(config, LARGE)


@given(
    layer_weights=st.integers(1, 1 << 30),
    max_tokens=st.integers(32, 70_000),
    asked=st.none() | st.integers(1, 70_000),
)
def test_padding_of_a_large_step_is_at_most_a_sixth(
    layer_weights: int, max_tokens: int, asked: int | None
) -> None:
    """It is the device's time, which a large step has none of to spare."""
    config = _config(max_tokens=max_tokens, max_requests=8, max_graph_tokens=asked)
    sizes = token_sizes(config, layer_weights)
    assert sizes == sorted(set(sizes))
    assert 0 < sizes[-1] <= max_tokens
    if asked is not None:
        assert sizes[-1] == min(max(asked, 8), max_tokens)
    elif max_tokens >= TOKENS[-1]:
        assert sizes[-1] >= TOKENS[-1]
        assert sizes[-1] in {*TOKENS, max_tokens} or sizes[-1] * 2 * layer_weights <= 600e9
    larger = [size for size in sizes if size >= TOKENS[-1]]
    assert all(after - before - 1 <= after / 6 for before, after in pairwise(larger))


@given(
    num_graphs=st.integers(1, 40),
    max_requests=st.integers(1, 600),
    max_tokens=st.integers(600, 20_000),
    num_mixed=st.integers(0, 20),
    is_even=st.booleans(),
    layer_weights=st.integers(0, 1 << 30),
)
def test_bounds_are_kept_and_the_largest_batch_has_a_graph(
    *, num_graphs: int, max_requests: int, max_tokens: int, num_mixed: int, is_even: bool, layer_weights: int
) -> None:
    """Whoever bounds the number of graphs has little memory, or little time to start."""
    config = _config(
        num_graphs=num_graphs,
        num_mixed_graphs=num_mixed,
        max_requests=max_requests,
        max_tokens=max_tokens,
        spaces_graphs_evenly=is_even,
    )
    rows, tokens = row_sizes(config), token_sizes(config, layer_weights)
    assert rows == sorted(set(rows))
    assert rows[-1] == max_requests
    assert len(rows) <= num_graphs
    assert tokens == sorted(set(tokens))
    assert len(tokens) <= min(num_graphs, num_mixed)
    assert all(0 < size <= max_tokens for size in rows + tokens)


def test_sizes_are_halves_or_at_even_distances() -> None:
    """The two spacings that a config names."""
    assert row_sizes(_config(num_graphs=4, max_requests=200)) == [25, 50, 100, 200]
    assert row_sizes(_config(num_graphs=4, max_requests=200, spaces_graphs_evenly=True)) == [
        56,
        112,
        168,
        200,
    ]
    assert token_sizes(_config(num_mixed_graphs=2, max_tokens=9_000), LARGE) == [2048, 4096]


@pytest.mark.parametrize(
    ("num_mixed", "expected"),
    [(23, CLOSE), (22, CLOSE[1:]), (13, CLOSE[10:]), (2, [8192, 16384])],
)
def test_bound_on_graphs_is_met_by_the_large_ones_first(num_mixed: int, expected: list[int]) -> None:
    """A large step that is padded to twice its size is worse than a small one, whoever asked for it."""
    config = _config(num_mixed_graphs=num_mixed, max_tokens=16_384)
    assert token_sizes(config, SMALL) == expected
    assert token_sizes(replace(config, max_graph_tokens=16_384), LARGE) == expected


def test_none_is_none() -> None:
    """Running op by op is how a wrong graph is found."""
    assert row_sizes(_config(num_graphs=0)) == []
    assert token_sizes(_config(num_graphs=0), SMALL) == []
    assert token_sizes(_config(num_mixed_graphs=0), SMALL) == []


def test_largest_mixed_step_is_as_large_as_asked_for() -> None:
    """Larger steps than ours pay where the host is slow; smaller ones save memory."""
    for weights in (SMALL, LARGE):
        assert token_sizes(_config(max_graph_tokens=8_192, max_tokens=16_384), weights)[-1] == 8_192
        assert token_sizes(_config(max_graph_tokens=100, max_tokens=16_384), weights) == [32, 64, 100]
        assert token_sizes(_config(max_graph_tokens=99_999, max_tokens=16_384), weights) == CLOSE


def _config(**changes: int | None) -> EngineConfig:
    return replace(engine_config(max_requests=8, max_tokens=256), **changes)
