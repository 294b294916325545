"""Times on results, on virtual time: seconds from the submission, to the hair."""

import anyio
import pytest
from trio.testing import MockClock

from tests.engines import engine_config, running
from tests.small_llm import greedy
from tests.test_generation import generated


@pytest.mark.trio
async def test_ttft_latency_and_tpot_of_a_lone_request(autojump_clock: MockClock) -> None:
    """Benchmarks are made of these three."""
    async with running(step_s=2.0) as rig:
        await anyio.sleep(100)
        (result,) = await generated(rig, "A", greedy(5))
    assert result.ttft == pytest.approx(2)
    assert result.latency == pytest.approx(10)
    assert result.tpot == pytest.approx([2])


@pytest.mark.trio
async def test_one_token_has_no_time_between_tokens(autojump_clock: MockClock) -> None:
    """There is no second one to wait for."""
    async with running(step_s=2.0) as rig:
        (result,) = await generated(rig, "A", greedy(1))
    assert (result.ttft, result.latency) == (pytest.approx(2), pytest.approx(2))
    assert not result.tpot


@pytest.mark.trio
async def test_waiting_for_a_row_counts_into_the_time_to_the_first_token(autojump_clock: MockClock) -> None:
    """What the client feels is from the submission, queue and all."""
    async with running(engine_config(max_requests=1), step_s=1.0) as rig:
        first, second = await generated(rig, ["A", "B"], greedy(4))
    assert (first.ttft, first.latency) == (pytest.approx(1), pytest.approx(4))
    assert second.ttft is not None
    assert second.ttft >= 5
    assert second.latency == pytest.approx(second.ttft + 3)
    assert second.tpot == pytest.approx([1])


@pytest.mark.trio
async def test_a_prompt_in_chunks_has_its_first_token_after_the_last_chunk(autojump_clock: MockClock) -> None:
    """A long prompt's chunks are steps like any other."""
    config = engine_config(max_tokens=10, max_requests=4, chunks_prompts=True)
    async with running(config, step_s=1.0) as rig:
        (result,) = await generated(rig, [[5] * 35], greedy(3))
    assert result.ttft == pytest.approx(4)
    assert result.latency == pytest.approx(6)


@pytest.mark.trio
async def test_a_timeout_ends_a_call_on_time(autojump_clock: MockClock) -> None:
    """The caller's deadline holds whatever step is running."""
    async with running(step_s=10.0) as rig:
        began = anyio.current_time()
        with pytest.raises(TimeoutError), anyio.fail_after(25):
            await generated(rig, "A", greedy(100))
        assert anyio.current_time() - began == pytest.approx(25)
