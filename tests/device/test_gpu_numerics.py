"""On a GPU, in bfloat16: as near to a float32 forward pass as megatron's own, on every backend."""

from collections.abc import Iterable

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
    """Greedy answers are float32's wherever megatron's errors leave no doubt, with graphs and op by op."""
    model, exact = twins
    num_clear = 0
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
        passes = [_plain_passes(model, exact, sequence.tokens[:-1], STEPS) for sequence in sequences]
        for sequence, (plain, reference) in zip(sequences, passes, strict=True):
            is_clear = clear_rows(plain, reference)
            assert torch.tensor(sequence.output)[is_clear].equal(reference.argmax(-1)[is_clear])
            num_clear += int(is_clear.sum())
        if num_graphs == 0:
            logits = torch.stack(recorded, 1).float().cpu()
            ours = _mean_error(logits, [reference for _, reference in passes])
            megatrons = _mean_error([plain for plain, _ in passes], [reference for _, reference in passes])
            print(f"relative error of logits: {ours:.3e}, megatron's {megatrons:.3e}")  # noqa: T201 - for -s
            assert ours <= 1.05 * megatrons
    assert num_clear > STEPS * len(PROMPT_LENGTHS)  # half of both runs' tokens


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


def clear_rows(plain: Tensor, reference: Tensor) -> Tensor:
    """Says in which rows the best logit leads the second by more than twice the largest error of a pass."""
    first, second = reference.topk(2).values.unbind(-1)
    return first - second > 2 * (plain - reference).abs().max()


def _plain_passes(model: Megatron, exact: Megatron, tokens: list[int], count: int) -> tuple[Tensor, Tensor]:
    """Gives the last `count` rows of logits, in bfloat16 by megatron's own forward pass, and in float32."""
    return _megatrons_logits(model, tokens)[-count:], plain_logits(exact, tokens)[-count:]


def _mean_error(logits: Iterable[Tensor], references: Iterable[Tensor]) -> float:
    """Gives the mean over rows of the error over the row's norm."""
    parts = [
        (some - reference).norm(dim=-1) / reference.norm(dim=-1)
        for some, reference in zip(logits, references, strict=True)
    ]
    return float(torch.cat(parts).mean())


@torch.inference_mode()
def _megatrons_logits(model: Megatron, tokens: list[int]) -> Tensor:
    """Gives `[tokens, vocab]` of megatron's unmodified forward pass in bfloat16, in float32 on the CPU."""
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    ids = torch.tensor([tokens], device="cuda")
    return model(ids, torch.arange(len(tokens), device="cuda")[None], None)[0].float().cpu()
