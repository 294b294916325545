"""On a GPU, in bfloat16: as near to a float32 forward pass as megatron's own, on every backend."""

import pytest
import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megallm.core_async.device.flash_libraries import has_flash
from megallm.core_async.device.runner import TorchRunner
from megallm.core_async.errors import UnsupportedModelError
from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron
from tests.device import models
from tests.device.models import Megatron, plain_logits
from tests.device.plans import Planner, engine_config
from tests.device.test_runner import recorded_logits

pytestmark = pytest.mark.gpu

NEAR_TIE = 1e-2
STEPS = 20
PROMPT_LENGTHS = [1, 7, 60, 200]
WIDE: models.Options = {
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "ffn_hidden_size": 1024,
    "kv_channels": 64,
}
MODELS: dict[str, tuple[models.Options | None, models.Options]] = {
    "head of 64": (None, {}),
    "head of 80": (None, {"kv_channels": 80}),
    "head of 96": (None, {"kv_channels": 96}),
    "head of 128, query and key norms": ({"qk_layernorm": True}, {"qk_layernorm": True, "kv_channels": 128}),
    "head of 192": (None, {"kv_channels": 192}),
    "head of 256, one kv head": (None, {"kv_channels": 256, "num_query_groups": 1}),
    "window": (None, {"window_size": (40, 0)}),
    "learned sinks": (None, {"softmax_type": "learnable"}),
}
"""Options of the layer spec and of the config."""
BACKENDS = ["triton", "sdpa", "flash"]


@pytest.fixture(scope="module", params=list(MODELS))
def twins(request: pytest.FixtureRequest) -> tuple[Megatron, Megatron]:
    """Gives a model in bfloat16 on the GPU, and its weights in float32 on the CPU."""
    with quiet_megatron():
        ensure_process_groups()
        spec, changes = MODELS[request.param]
        changes = {**WIDE, **changes}
        small = models.gpt(spec=spec, params_dtype=torch.bfloat16, bf16=True, **changes).bfloat16()
        exact = models.gpt(spec=spec, **changes)
    for ours, theirs in zip(small.parameters(), exact.parameters(), strict=True):
        ours.data.mul_(0.3) if ours.dim() > 1 else ours
        theirs.data.copy_(ours.data.float())
    return small.cuda(), exact


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_as_near_to_float32_as_megatrons_own(
    twins: tuple[Megatron, Megatron], backend: str
) -> None:
    """Greedy answers follow megatron's up to the first near-tie, with graphs and op by op."""
    model, exact = twins
    answers: list[list[list[int]]] = []
    errors: list[tuple[Tensor, Tensor]] = []
    for num_graphs in (0, 4):
        planner = _started(model, backend, num_graphs)
        try:
            sequences = [
                planner.add([(7 * place + 3) % 96 for place in range(count)]) for count in PROMPT_LENGTHS
            ]
            with recorded_logits(model) as recorded:
                planner.step(*((sequence, sequence.num_pending) for sequence in sequences))
                planner.decode(*sequences, num_steps=STEPS - 1)
        finally:
            planner.runner.close()
        answers.append([sequence.output for sequence in sequences])
        if num_graphs == 0:
            logits = torch.stack(recorded, 1).float().cpu()
            errors = [
                _errors(model, exact, sequence.tokens[:-1], sequence.output, logits[place])
                for place, sequence in enumerate(sequences)
            ]
    ours, megatrons = (torch.cat(parts).mean() for parts in zip(*errors, strict=True))
    print(f"relative error of logits: {float(ours):.3e}, megatron's {float(megatrons):.3e}")  # noqa: T201 - for -s
    assert ours <= 1.05 * megatrons
    for eager, captured, count in zip(*answers, PROMPT_LENGTHS, strict=True):
        prompt = [(7 * place + 3) % 96 for place in range(count)]
        plain = _megatrons_logits(model, prompt + captured[:-1])[count - 1 :]
        for place, token in enumerate(captured):
            first, second = plain[place].topk(2).values.tolist()
            if first - second < NEAR_TIE * max(1.0, abs(first)):
                break
            assert token == int(plain[place].argmax())
            assert eager[place] == token


def _started(model: Megatron, backend: str, num_graphs: int) -> Planner:
    if backend == "flash" and not has_flash():
        pytest.skip("flash-attn is not installed")
    limits = engine_config(
        attention_backend=backend,
        block_size=256 if backend == "flash" else 16,
        num_blocks=16 if backend == "flash" else 128,
        max_sequence_length=512,
        max_tokens=1024,
        num_graphs=num_graphs,
    )
    runner = TorchRunner(model, limits)
    try:
        runner.start()
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    return Planner(runner, limits)


def _errors(
    model: Megatron, exact: Megatron, tokens: list[int], output: list[int], logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Gives each row's relative error: ours, and megatron's."""
    reference = plain_logits(exact, tokens)[-len(output) :]
    plain = _megatrons_logits(model, tokens)[-len(output) :]
    norms = reference.norm(dim=-1)
    return (logits - reference).norm(dim=-1) / norms, (plain - reference).norm(dim=-1) / norms


@torch.inference_mode()
def _megatrons_logits(model: Megatron, tokens: list[int]) -> Tensor:
    """Gives `[tokens, vocab]` of megatron's unmodified forward pass in bfloat16, in float32 on the CPU."""
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    ids = torch.tensor([tokens], device="cuda")
    return model(ids, torch.arange(len(tokens), device="cuda")[None], None)[0].float().cpu()
