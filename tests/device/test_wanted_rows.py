"""The last layer's work is done for the tokens whose logits are wanted, unless somebody looks."""

import pytest
import torch
from torch import Tensor, nn

from megallm.core_async.device.attention_sdpa import SdpaAttention
from megallm.core_async.device.dense_layer import TorchOps
from megallm.core_async.device.model import ModelHook
from tests.device.conftest import StartRunner, built
from tests.device.models import Megatron, plain_continuation, plain_logits
from tests.device.test_model import allocated_caches, continuation

PROMPT = [3, 1, 4, 1, 5]


class CountingOps(TorchOps):
    """torch's arithmetic, which keeps how many rows each layer gated."""

    def __init__(self) -> None:
        self.gated: list[int] = []

    def gated_linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gives the gate of a product."""
        self.gated.append(len(rows))
        return super().gated_linear(rows, weight, bias)


def logits_and_rows(model: Megatron, *, is_whole: bool = True) -> tuple[Tensor, list[int]]:
    """Gives the logits of a prompt and five decode steps, and the rows that their layers gated."""
    hook, ops, backend = ModelHook(model), CountingOps(), SdpaAttention(4)
    hook.is_whole = is_whole
    caches = allocated_caches(hook)
    hook.bind(backend, caches.layers, ops, max_positions=32)
    try:
        logits = continuation(hook, backend, PROMPT)
    finally:
        hook.unbind()
    return logits, ops.gated


def test_last_layer_works_for_the_sampled_token_alone() -> None:
    """Of a long prompt it would be one layer in so many for nothing."""
    model = built("grouped heads")
    logits, rows = logits_and_rows(model)
    assert rows == [5, 5, 1] + [1] * 15
    greedy = plain_continuation(model, PROMPT, 6)
    expected = plain_logits(model, PROMPT + greedy[:-1])[len(PROMPT) - 1 :]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("watched", ["decoder", "decoder.final_layernorm", "decoder.layers.2"])
def test_who_looks_sees_every_token(watched: str) -> None:
    """Activations of the last layer are what probes are trained on."""
    model = built("grouped heads")
    seen: list[int] = []

    def see(module: nn.Module, args: object, out: Tensor | tuple[Tensor, ...]) -> None:
        seen.append(len(out[0] if isinstance(out, tuple) else out))

    handle = model.get_submodule(watched).register_forward_hook(see)
    try:
        _, rows = logits_and_rows(model)
    finally:
        handle.remove()
    assert rows == [5, 5, 5] + [1] * 15
    assert seen == [5] + [1] * 5


def test_who_looks_at_all_modules_sees_every_token() -> None:
    """A probe of everything is registered with torch, not with a module: megatron's own layers run then."""
    model = built("grouped heads")
    seen: list[int] = []

    def see(module: nn.Module, args: object, out: object) -> None:
        if module is model.decoder.layers[-1] and isinstance(out, tuple):
            seen.append(len(out[0]))

    handle = nn.modules.module.register_module_forward_hook(see)
    try:
        _, rows = logits_and_rows(model)
    finally:
        handle.remove()
    assert (rows, seen) == ([], [5] + [1] * 5)


def test_ranks_that_share_the_last_layer_work_for_every_token() -> None:
    """Each knows its own hooks alone, and sums with the others what has as many rows."""
    _, rows = logits_and_rows(built("grouped heads"), is_whole=False)
    assert rows == [5, 5, 5] + [1] * 15


def test_prompts_with_and_without_scores_and_chunks_without_samples_share_steps(
    model: Megatron, start: StartRunner
) -> None:
    """What a step wants differs from step to step; a chunk that is not the last wants nothing."""
    planner = start(model)
    plain = planner.add([1, 2, 3, 4, 5, 6, 7])
    whole = planner.add([9, 8, 7, 6], scores_prompt=True)
    planner.step((plain, 3))
    planner.step((plain, 2), (whole, 4))
    planner.step((plain, 2), (whole, 1))
    planner.decode(plain, whole, num_steps=3)
    for sequence in (plain, whole):
        count = sequence.prompt_length
        assert sequence.output == plain_continuation(model, sequence.tokens[:count], len(sequence.output))
    expected = plain_logits(model, [9, 8, 7, 6])[:3].log_softmax(-1)
    wanted = [float(row[token]) for row, token in zip(expected, [8, 7, 6], strict=True)]
    assert whole.scores == pytest.approx(wanted, abs=1e-4)
