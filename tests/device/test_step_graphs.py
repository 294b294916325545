"""Captured steps give what the plain forward pass gives, on a GPU."""

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.mark.gpu
def test_kernels_are_compiled_once_and_before_any_is_captured(
    on_gpu: tuple[Megatron, list[list[int]]],
    start: StartRunner,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From an empty cache: one that is left out would compile alone, while others wait."""
    from triton import knobs

    compiled: list[object] = []

    def hook(*, fn: Any, key: str, **_: object) -> None:  # Any: Triton's
        compiled.append((fn.name, key))

    forget_kernels()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    model, expected = on_gpu
    with caplog.at_level(logging.INFO, "megallm.core_async.device.step_graphs"):
        planner = start(model, engine_config())
    told = [record.args for record in caplog.records if record.msg.startswith("compiled")]
    assert [args[0] for args in told if isinstance(args, tuple)] == [len(compiled)]
    assert len(compiled) == len(set(compiled)) == len(list(tmp_path.rglob("*.cubin")))
    sequence = planner.add(PROMPTS[1])
    planner.step((sequence, 9))
    for _ in range(4):
        planner.step((sequence, 1))
    assert sequence.output == expected[1][:5]
    assert len(list(tmp_path.rglob("*.cubin"))) == len(compiled)


def forget_kernels() -> None:
    """Makes this process know no compiled kernel."""
    from triton.runtime.jit import JITFunction

    folder = Path(importlib.import_module("megallm.core_async.device").__path__[0])
    for path in folder.glob("triton_*.py"):
        module = importlib.import_module(f"megallm.core_async.device.{path.stem}")
        kernels: list[Any] = [kernel for kernel in vars(module).values() if isinstance(kernel, JITFunction)]
        for kernel in kernels:
            kernel.device_caches.clear()
