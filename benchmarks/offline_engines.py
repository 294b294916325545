"""The engines that `offline` runs side by side: megallm, and transformers' `generate` on the same weights.

Both decode greedily, end no output early, and say when each of their steps ended.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch, megatron-core and transformers are untyped in part)

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from msgspec import Struct

from benchmarks.load import Case
from megallm import InferenceConfig, MegatronLLM, SamplingParams
from megallm.core_async.messages import StepResult
from megallm.core_async.step_times import StepTimes
from megallm.models.checkpoint import Checkpoint, tensor_specs

MILLI = 1e3


class Timing(Struct, frozen=True):
    """One run of a case on one engine."""

    wall_s: float
    prompt_s: float
    """From the call to the first token of the last prompt that got one."""
    step_ms: dict[str, float]
    """Milliseconds of a step by part: the median step's, so a decode step's where most steps are."""
    token_ids: list[list[int]]


class Engine(Protocol):
    """Something that generates."""

    def run(self, case: Case) -> Timing:
        """Runs a case once."""
        ...

    def close(self) -> None:
        """Frees what it holds."""
        ...


class Megallm:
    """`MegatronLLM`, as a script uses it."""

    def __init__(  # Any: megatron's model is untyped
        self,
        model: Any,
        tokenizer: Any,
        cases: Sequence[Case],
        cache_gb: float,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """Starts an engine whose limits hold every one of `cases`."""
        longest = max(max(map(sum, zip(c.prompt_lengths, c.output_lengths, strict=True))) for c in cases)
        config = InferenceConfig(
            buffer_size_gb=cache_gb,  # pyright: ignore[reportArgumentType] - declared int, used as a number
            max_requests=max(case.num_prompts for case in cases),
            max_sequence_length=longest,
        )
        self._llm = MegatronLLM(
            model=model,
            tokenizer=tokenizer,
            inference_config=config,
            use_coordinator=False,
            batch_invariant=batch_invariant,
        )
        self._vocab_size = self._llm.engine.config.vocab_size
        self._text_times = self._llm.engine.times
        self._steps = StepLog()
        self._llm.engine.times = self._steps

    def run(self, case: Case) -> Timing:
        """Runs a case once; `step_ms` has the parts of `StepTimes` and `total`, from result to result."""
        prompts = case.prompts(self._vocab_size)
        params: list[Any] = [  # Any: a list of a subclass is no list of its base
            SamplingParams(temperature=0.0, num_tokens_to_generate=length, ignore_eos=True)
            for length in case.output_lengths
        ]
        self._steps.clear()
        post_s, began = self._text_times.post_s, time.perf_counter()
        results = self._llm.generate(prompts, params, progress=False)
        wall_s = time.perf_counter() - began
        step_ms = self._steps.medians_ms()
        step_ms["post"] = (self._text_times.post_s - post_s) / self._steps.num_steps * MILLI
        if max(case.output_lengths) > 1:
            step_ms["total"] = median_gap_ms(self._steps.ends_s)
        return Timing(
            wall_s=wall_s,
            prompt_s=max(result.ttft or 0.0 for result in results),
            step_ms=step_ms,
            token_ids=[result.generated_tokens for result in results],
        )

    def close(self) -> None:
        """Shuts the engine down."""
        self._llm.shutdown()


class StepLog(StepTimes):
    """`StepTimes` that keeps every step, for medians: a sum would mix prefill steps with decode steps."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[str, list[float]] = {}
        self.ends_s: list[float] = []
        """When each step's result came."""
        self.clear()

    def clear(self) -> None:
        """Forgets the steps so far."""
        self.num_steps = 0
        self._parts = {part: [] for part in ("plan", "prepare", "forward", "sample")}
        self.ends_s = []

    def add_plan(self, seconds: float) -> None:
        """Adds one answer of the scheduler."""
        self._parts["plan"].append(seconds)

    def add_result(self, result: StepResult) -> None:
        """Adds what the rank's thread spent on one step."""
        self.num_steps += 1
        self.ends_s.append(time.perf_counter())
        self._parts["prepare"].append(result.prepare_s)
        self._parts["forward"].append(result.forward_s)
        self._parts["sample"].append(result.sample_s)

    def medians_ms(self) -> dict[str, float]:
        """Gives the median of each part."""
        return {part: statistics.median(seconds) * MILLI for part, seconds in self._parts.items()}


class Transformers:
    """transformers' `LlamaForCausalLM.generate`, prompts of unequal length padded on the left."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        self._model = llama_of(checkpoint).to(dtype=dtype, device=device)
        self._vocab_size = checkpoint.hyperparameters.vocab_size

    @torch.inference_mode()
    def run(self, case: Case) -> Timing:
        """Runs a case once; `step_ms` has `total` alone, from token to token."""
        from transformers import GenerationConfig  # noqa: PLC0415 - may be missing

        prompts = case.prompts(self._vocab_size)
        longest = max(case.prompt_lengths)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        config = GenerationConfig(
            max_new_tokens=max(case.output_lengths), do_sample=False, eos_token_id=None, pad_token_id=0
        )
        ends_s: list[float] = []

        def note_token(ids: torch.Tensor, _: object, **__: object) -> torch.Tensor:
            ends_s.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        began = time.perf_counter()
        output = self._model.generate(
            ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            generation_config=config,
            stopping_criteria=[note_token],
        )
        rows = output[:, longest:].tolist()
        wall_s = time.perf_counter() - began
        assert len(rows[0]) == max(case.output_lengths), f"{len(rows[0])} tokens came for {case.name}"
        token_ids = [row[:length] for row, length in zip(rows, case.output_lengths, strict=True)]
        step_ms = {"total": median_gap_ms(ends_s)} if len(ends_s) > 1 else {}
        return Timing(wall_s=wall_s, prompt_s=ends_s[0] - began, step_ms=step_ms, token_ids=token_ids)

    def close(self) -> None:
        """Frees the weights."""
        del self._model


def llama_of(checkpoint: Checkpoint) -> Any:  # Any: transformers may be missing
    """Gives transformers' Llama with the checkpoint's weights, float32, on the CPU.

    Raises: ImportError without transformers.
    """
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - may be missing

    size = checkpoint.hyperparameters
    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.ffn_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.max_positions,
        rms_norm_eps=size.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": size.rotary_base},
        tie_word_embeddings=size.is_tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("sdpa")
    weights = {spec.name: checkpoint.read(spec.name).float() for spec in tensor_specs(size)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    allowed = ["lm_head.weight"] if size.is_tied else []  # the embedding itself
    assert missing == allowed, f"weights missing: {missing}, allowed to: {allowed}"
    assert not unexpected, f"weights that the model does not take: {unexpected}"
    return model


def median_gap_ms(ends_s: Sequence[float]) -> float:
    """Gives the median time from the end of one step to the end of the next."""
    return statistics.median((end - start) * MILLI for start, end in pairwise(ends_s))
