"""Captured steps give what the plain forward pass gives, on a GPU."""

from collections.abc import Iterator

import pytest
import torch

from megallm.core_async.messages import pack_ints
from tests.device.conftest import StartRunner, built
from tests.device.models import Megatron, plain_continuation
from tests.device.plans import engine_config

PROMPTS = [[3, 5, 9, 11, 2], [7] * 9, [1, 2, 3]]


@pytest.fixture(params=["grouped heads", "query and key norms, biases", "one kv head", "learned sinks"])
def on_gpu(request: pytest.FixtureRequest) -> Iterator[tuple[Megatron, list[list[int]]]]:
    """Gives a model on the GPU, and each prompt's greedy continuation by plain passes on the CPU."""
    model = built(request.param)
    expected = [plain_continuation(model, prompt, 7) for prompt in PROMPTS]
    yield model.cuda(), expected
    model.cpu()


@pytest.mark.gpu
def test_captured_steps_give_the_plain_forward_pass(
    on_gpu: tuple[Megatron, list[list[int]]], start: StartRunner
) -> None:
    """Chunks, decode rows and both, in batches padded to a graph's size, with nothing that waits."""
    model, expected = on_gpu
    planner = start(model, engine_config())
    sequences = [planner.add(prompt) for prompt in PROMPTS]
    torch.cuda.set_sync_debug_mode("error")
    try:
        planner.step((sequences[0], 5))
        planner.step((sequences[0], 1), (sequences[1], 4))
        planner.step((sequences[0], 1), (sequences[1], 5), (sequences[2], 3))
        for _ in range(4):
            planner.step(*((sequence, 1) for sequence in sequences))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for sequence, tokens in zip(sequences, expected, strict=True):
        assert sequence.output == tokens[: len(sequence.output)]
        assert len(sequence.output) >= 5


@pytest.mark.gpu
def test_steps_go_on_after_the_cache_was_released(
    on_gpu: tuple[Megatron, list[list[int]]], start: StartRunner
) -> None:
    """A graph reads the cache where it was when it was captured."""
    model, expected = on_gpu
    planner = start(model, engine_config())
    sequence = planner.add(PROMPTS[1])
    planner.step((sequence, 9))
    planner.runner.release_cache(pack_ints(sequence.blocks))
    planner.runner.restore_cache()
    for _ in range(4):
        planner.step((sequence, 1))
    assert sequence.output == expected[1][:5]
