"""Which sizes of steps are captured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.config import EngineConfig
from megallm.core_async.device.graph_sizes import TOKENS, row_sizes, token_sizes
from tests.device.plans import engine_config


@pytest.mark.parametrize("max_rows", [1, 3, 8, 100, 256, 500])
def test_every_number_of_rows_has_a_graph(max_rows: int) -> None:
    """The largest batch must not fall back to running op by op."""
    sizes = row_sizes(engine_config(max_requests=max_rows))
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows


def test_no_mixed_step_is_captured_that_no_plan_reaches() -> None:
    """Each graph takes time and memory."""
    assert token_sizes(engine_config(max_tokens=100)) == [32, 64]
    assert token_sizes(engine_config(max_tokens=16_384)) == list(TOKENS)


@given(
    num_graphs=st.integers(1, 40),
    max_requests=st.integers(1, 600),
    max_tokens=st.integers(600, 20_000),
    num_mixed=st.integers(0, 20),
    is_even=st.booleans(),
)
def test_bounds_are_kept_and_the_largest_batch_has_a_graph(
    *, num_graphs: int, max_requests: int, max_tokens: int, num_mixed: int, is_even: bool
) -> None:
    """Whoever bounds the number of graphs has little memory, or little time to start."""
    config = _config(
        num_graphs=num_graphs,
        num_mixed_graphs=num_mixed,
        max_requests=max_requests,
        max_tokens=max_tokens,
        spaces_graphs_evenly=is_even,
    )
    rows, tokens = row_sizes(config), token_sizes(config)
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
    assert token_sizes(_config(num_mixed_graphs=2, max_tokens=9_000)) == [2048, 4096]


def test_a_few_too_many_lose_the_smallest() -> None:
    """Our sizes stand closer together than halves do."""
    config = _config(num_mixed_graphs=16, max_graph_tokens=16_384, max_tokens=16_384, max_requests=8)
    assert token_sizes(config) == [*TOKENS, 6_144, 8_192, 12_288, 16_384][1:]


def test_none_is_none() -> None:
    """Running op by op is how a wrong graph is found."""
    assert row_sizes(_config(num_graphs=0)) == []
    assert token_sizes(_config(num_graphs=0)) == []
    assert token_sizes(_config(num_mixed_graphs=0)) == []


def test_largest_mixed_step_is_as_large_as_asked_for() -> None:
    """Larger steps than ours pay where the host is slow; smaller ones save memory."""
    assert token_sizes(_config(max_graph_tokens=8_192, max_tokens=16_384))[-1] == 8_192
    assert token_sizes(_config(max_graph_tokens=100, max_tokens=16_384)) == [32, 64, 100]
    assert token_sizes(_config(max_graph_tokens=99_999, max_tokens=16_384))[-1] == 16_384


def _config(**changes: int) -> EngineConfig:
    return engine_config(**{"max_requests": 8, "max_tokens": 256, **changes})
