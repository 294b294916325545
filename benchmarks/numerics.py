"""How far the engine's log-probs are from those of a plain forward pass of the same module, and of float32's.

Every prompt is continued with the engine's own samples. `kl` is the mean over generated tokens of
exp(d) - 1 - d, where d is the plain log-prob less the engine's ("Approximating KL Divergence", Schulman,
2020: the estimator k3). `fp32_*` are mean absolute distances from a float32 forward pass on the CPU: the
engine's, and the plain pass's. `same` counts greedy tokens that are the plain pass's, up to each text's first
near-tie; `clear` those that are float32's, where its best logit leads by more than twice the largest error of
the plain pass: elsewhere neither pass can tell.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and megatron-core are untyped in part)

import argparse
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from benchmarks.load import SEED
from benchmarks.report import Cell, Report, Table, show_progress, significant
from benchmarks.shapes import SHAPES, NumberTokenizer
from megallm.models.checkpoint import Hyperparameters

if TYPE_CHECKING:
    from torch import Tensor

TINY: Final = {
    f"head-{head_dim}": Hyperparameters(
        num_layers=6,
        hidden_size=768,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=2048,
        vocab_size=8192,
        max_positions=4096,
        rotary_base=10_000.0,
        norm_epsilon=1e-5,
        is_tied=False,
    )
    for head_dim, num_heads, num_kv_heads in ((64, 12, 4), (96, 8, 8), (128, 6, 2), (256, 3, 1))
}
"""Random models small enough for a float32 forward pass on a CPU."""
NEAR_TIE: Final = 1e-2
"""Between the two best logits: below it, rounding may choose."""
COLUMNS: Final = (
    "model", "backend", "graphs", "tokens", "mean_abs", "max_abs", "kl", "fp32_engine", "fp32_plain", "same",
    "clear",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add(
        "--models",
        default=",".join(TINY),
        metavar="NAME,...",
        help=f"known names, paths, or random weights: {', '.join((*TINY, *SHAPES))} (default: %(default)s)",
    )
    add("--backends", default="auto", metavar="NAME,...", help="default: %(default)s")
    add("--prompts", type=int, default=16, metavar="N", help="default: %(default)s")
    add("--input", type=int, default=200, metavar="TOKENS", help="at most (default: %(default)s)")
    add("--output", type=int, default=64, metavar="TOKENS", help="default: %(default)s")
    add("--batch-invariant", action="store_true", help="run the engine so")


def run(options: argparse.Namespace) -> Report:
    """Measures every model on every backend, with graphs and op by op where there is a GPU."""
    import torch  # noqa: PLC0415 - takes seconds, which `--help` need not wait for

    has_gpu = torch.cuda.is_available()
    results: list[dict[str, object]] = []
    for name in options.models.split(","):
        trio = _twins(name)
        for backend in options.backends.split(","):
            for num_graphs in (None, 0) if has_gpu else (None,):
                show_progress(f"numerics: {name}, {backend}, graphs {num_graphs}")
                results.append(
                    {
                        "model": name,
                        "backend": backend,
                        "graphs": "none" if num_graphs == 0 or not has_gpu else "captured",
                        "batch_invariant": options.batch_invariant,
                        **_measured(trio, backend, num_graphs, options),
                    }
                )
    rows = [tuple(_cell(row.get(column)) for column in COLUMNS) for row in results]
    return Report("numerics", [Table("Log-probs against a plain forward pass", COLUMNS, rows)], results)


def _cell(value: object) -> Cell:
    assert value is None or isinstance(value, str | float | int), f"a cell is {value!r}"
    return value


def _twins(name: str) -> tuple[Any, Any, Any]:  # Any: megatron's models are untyped, tokenizers of any kind
    """Gives a model as it runs, its weights in float32 on the CPU, and a tokenizer."""
    import torch  # noqa: PLC0415 - slow to import

    from megallm import load_model  # noqa: PLC0415 - slow to import
    from megallm.models.gpt import random_gpt  # noqa: PLC0415 - slow to import
    from megallm.models.megatron_setup import ensure_process_groups, quiet_megatron  # noqa: PLC0415 - slow to import

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = {**TINY, **SHAPES}.get(name)
    if size is None:
        model, tokenizer = load_model(name, dtype=dtype, device=device)
        exact, _ = load_model(name, dtype=torch.float32, device=torch.device("cpu"))
    else:
        with quiet_megatron():
            ensure_process_groups()
            model = random_gpt(size, dtype=dtype, device=device)
            exact = random_gpt(size, dtype=torch.float32, device=torch.device("cpu"))
        tokenizer = NumberTokenizer(size.vocab_size)
        for parameter in model.parameters():  # else all tokens are about as likely
            parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        theirs.data.copy_(ours.data)
    return model, exact, tokenizer


def _measured(
    trio: tuple[Any, Any, Any],  # Any: see `_twins`
    backend: str,
    num_graphs: int | None,
    options: argparse.Namespace,
) -> dict[str, object]:
    """Generates, and compares."""
    import torch  # noqa: PLC0415 - slow to import

    from megallm import InferenceConfig, MegatronLLM, SamplingParams  # noqa: PLC0415 - slow to import

    model, exact, tokenizer = trio
    prompts = _prompts(model.vocab_size, options)
    config = InferenceConfig(
        buffer_size_gb=1,
        max_sequence_length=options.input + options.output,
        max_requests=options.prompts,
        num_cuda_graphs=num_graphs,
    )
    drawn, greedy = (
        SamplingParams(
            temperature=temperature,
            seed=SEED,
            num_tokens_to_generate=options.output,
            ignore_eos=True,
            return_log_probs=True,
            skip_prompt_log_probs=True,
        )
        for temperature in (1.0, 0.0)
    )
    with MegatronLLM(
        model=model,
        tokenizer=tokenizer,
        inference_config=config,
        attention_backend=backend,
        batch_invariant=options.batch_invariant,
        use_coordinator=False,
    ) as llm:
        samples = llm.generate(prompts, drawn, progress=False)
        best = llm.generate(prompts, greedy, progress=False)
    apart: list[Tensor] = []
    engine_error: list[Tensor] = []
    plain_error: list[Tensor] = []
    for prompt, result in zip(prompts, samples, strict=True):
        ours = torch.tensor(result.generated_log_probs)
        plain, reference = (_log_probs(some, prompt, result.generated_tokens) for some in (model, exact))
        apart.append(plain - ours)
        engine_error.append((ours - reference).abs())
        plain_error.append((plain - reference).abs())
    outputs = [result.generated_tokens for result in best]
    return {
        **_distances(torch.cat(apart)),
        "fp32_engine": significant(float(torch.cat(engine_error).mean())),
        "fp32_plain": significant(float(torch.cat(plain_error).mean())),
        **_agreement(model, exact, zip(prompts, outputs, strict=True)),
    }


def _agreement(model: Any, exact: Any, texts: Iterable[tuple[list[int], list[int]]]) -> dict[str, object]:
    """Gives how many greedy tokens are the other passes', as `same` and `clear`. Any: see `_twins`."""
    same: list[tuple[int, int]] = []
    clear: list[tuple[int, int]] = []
    for prompt, output in texts:
        plain, reference = (_logits(some, prompt + output[:-1])[len(prompt) - 1 :] for some in (model, exact))
        same.append(same_tokens(plain, output))
        clear.append(clear_tokens(plain, reference, output))
    return {"same": _shown(same), "clear": _shown(clear)}


def _prompts(vocab_size: int, options: argparse.Namespace) -> list[list[int]]:
    rng = random.Random(SEED)
    lengths = [rng.randint(1, options.input) for _ in range(options.prompts)]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _distances(apart: "Tensor") -> dict[str, object]:
    """Gives the statistics of plain log-probs less the engine's, of tokens that the engine drew."""
    return {
        "tokens": len(apart),
        "mean_abs": significant(float(apart.abs().mean())),
        "max_abs": significant(float(apart.abs().max())),
        "kl": significant(float((apart.exp() - 1 - apart).mean())),
    }


def _log_probs(model: Any, prompt: list[int], output: list[int]) -> "Tensor":
    """Gives the plain forward pass's log-probs of the output. Any: megatron's model is untyped."""
    import torch  # noqa: PLC0415 - slow to import

    logits = _logits(model, prompt + output[:-1])[len(prompt) - 1 :]
    return logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]


def same_tokens(plain: "Tensor", output: list[int]) -> tuple[int, int]:
    """Gives how many greedy tokens are those of the plain pass, and of how many: up to the first near-tie."""
    ties = (_leads(plain) < NEAR_TIE).nonzero()
    count = int(ties[0]) if len(ties) else len(output)
    best = plain.argmax(-1).tolist()
    return sum(one == other for one, other in zip(best[:count], output[:count], strict=True)), count


def clear_tokens(plain: "Tensor", reference: "Tensor", output: list[int]) -> tuple[int, int]:
    """Gives how many greedy tokens are float32's, and of how many: where the plain pass can tell, too."""
    is_clear = (_leads(reference) > 2 * (plain - reference).abs().max()).tolist()
    pairs = zip(reference.argmax(-1).tolist(), output, is_clear, strict=True)
    same = [one == other for one, other, counts in pairs if counts]
    return sum(same), len(same)


def _leads(logits: "Tensor") -> "Tensor":
    """Gives by how much each row's best logit is above its second."""
    first, second = logits.topk(2).values.unbind(-1)
    return first - second


def _shown(counts: list[tuple[int, int]]) -> str:
    return f"{sum(good for good, _ in counts)}/{sum(count for _, count in counts)}"


def _logits(model: Any, tokens: list[int]) -> "Tensor":
    """Gives `[tokens, vocab]` of an unmodified forward pass, in float32 on the CPU."""
    import torch  # noqa: PLC0415 - slow to import

    from benchmarks.plain_forward import plain_logits  # noqa: PLC0415 - slow to import

    with torch.inference_mode():
        return plain_logits(model, tokens).float().cpu()
