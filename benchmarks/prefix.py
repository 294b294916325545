"""A long system prompt with many short questions behind it, without and with prefix caching.

All questions come at once, to an engine that has seen none of them. `prefill_tokens` are those the
model computed; the times to the first token are from the call, so they hold the wait for others.
The two take turns in one run, and medians over the turns are shown; the tokens that they generate
have to be equal.
"""

import argparse
import statistics
from functools import partial
from typing import Any

from msgspec import Struct

from benchmarks.load import random_prompts
from benchmarks.measure import alternate, num_cores
from benchmarks.report import Report, Table, show_progress, significant


class Outcome(Struct, frozen=True):
    """One run."""

    prefill_tokens: int
    mean_ttft_s: float
    last_ttft_s: float
    token_ids: list[list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="a known name or a path (default: %(default)s)")
    add("--system", type=int, default=600, metavar="N", help="tokens of the system prompt (default: 600)")
    add("--questions", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--question-tokens", type=int, default=12, metavar="N", help="default: %(default)s")
    add("--output", type=int, default=4, metavar="N", help="tokens of an answer (default: %(default)s)")
    add("--block-size", type=int, default=16, metavar="N", help="tokens of a block (default: %(default)s)")
    add("--step-tokens", type=int, default=2048, metavar="N", help="of a step (default: %(default)s)")
    add("--repetitions", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--threads", type=int, default=num_cores(), metavar="N", help="CPU threads (default: %(default)s)")


def run(options: argparse.Namespace) -> Report:
    """Measures both."""
    import torch  # noqa: PLC0415 - slow to import

    from megallm import load_model  # noqa: PLC0415 - the same

    torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model)
    runs = {
        "off": partial(_ask, options, model, tokenizer, caches=False),
        "on": partial(_ask, options, model, tokenizer, caches=True),
    }
    outcomes = alternate(runs, options.repetitions)
    equal = {str(outcome.token_ids) for each in outcomes.values() for outcome in each}
    assert len(equal) == 1, f"the tokens are not the same: {equal}"
    results: list[dict[str, Any]] = [  # Any: cells of a table
        {"model": options.model, "cache": name, **_figures(each)} for name, each in outcomes.items()
    ]
    off, on = results
    ratios: dict[str, Any] = {  # Any: the same
        "prefill_tokens_saved_percent": significant(
            100 * (1 - on["prefill_tokens"] / off["prefill_tokens"]), 3
        ),
        "mean_ttft_ratio": significant(off["mean_ttft_s"] / on["mean_ttft_s"], 3),
        "last_ttft_ratio": significant(off["last_ttft_s"] / on["last_ttft_s"], 3),
    }
    title = f"{options.questions} questions behind {options.system} tokens, {options.threads} threads"
    tables = [
        Table(title, tuple(off), [tuple(row.values()) for row in results]),
        Table("With the cache", tuple(ratios), [tuple(ratios.values())]),
    ]
    return Report("prefix", tables, [*results, ratios])


def _figures(outcomes: list[Outcome]) -> dict[str, Any]:  # Any: cells of a table
    return {
        "prefill_tokens": outcomes[0].prefill_tokens,
        "mean_ttft_s": significant(statistics.median(each.mean_ttft_s for each in outcomes)),
        "last_ttft_s": significant(statistics.median(each.last_ttft_s for each in outcomes)),
    }


# Any: megatron's model is untyped
def _ask(options: argparse.Namespace, model: Any, tokenizer: Any, *, caches: bool) -> Outcome:
    """Asks all questions at once, of a new engine that has run one other prompt."""
    from megallm import InferenceConfig, MegatronLLM, SamplingParams  # noqa: PLC0415 - slow to import

    show_progress(f"prefix: cache {'on' if caches else 'off'}")
    system, *questions = random_prompts(
        (options.system, *[options.question_tokens] * options.questions), tokenizer.vocab_size
    )
    prompts: list[Any] = [[*system, *question] for question in questions]  # Any: the public API takes both
    config = InferenceConfig(
        block_size_tokens=options.block_size,
        buffer_size_gb=4,
        max_requests=options.questions,
        max_tokens=max(options.step_tokens, options.questions),
        max_sequence_length=options.system + options.question_tokens + options.output,
        enable_chunked_prefill=True,
        enable_prefix_caching=caches,
    )
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=options.output, ignore_eos=True)
    with MegatronLLM(model=model, tokenizer=tokenizer, inference_config=config) as llm:
        llm.generate([[1] * options.question_tokens], params, progress=False)  # kernels compile
        before = llm.engine.stats().prefill_tokens
        results = llm.generate(prompts, params, progress=False)
        prefilled = llm.engine.stats().prefill_tokens - before
    ttfts = [result.ttft or 0.0 for result in results]
    return Outcome(prefilled, statistics.mean(ttfts), max(ttfts), [each.generated_tokens for each in results])
