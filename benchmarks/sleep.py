"""What suspend gives back, what resume takes, and what is left behind by many cycles and many requests.

Memory is what the driver has lent out (`torch.cuda.mem_get_info`), so a leak in any library shows. Needs a
CUDA device.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, Final, cast

from benchmarks.load import SEED
from benchmarks.report import Cell, Report, Table, show_progress, significant
from benchmarks.shapes import SHAPES, random_model

MODES: Final = ("offload", "recompute")
MIB: Final = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add("--model", default="shape-0.6b", help=f"random weights: {', '.join(SHAPES)} (default: %(default)s)")
    add("--cycles", type=int, default=200, metavar="N", help="default: %(default)s")
    add("--requests", type=int, default=10_000, metavar="N", help="default: %(default)s")
    add("--graphs", type=int, default=None, metavar="N", help="num_cuda_graphs (default: as many as pay)")
    add("--cache-gb", type=float, default=8.0, metavar="GB", help="default: %(default)s")


def run(options: argparse.Namespace) -> Report:
    """Measures both modes, then the requests."""
    import torch  # noqa: PLC0415 - takes seconds, which `--help` need not wait for

    if not torch.cuda.is_available():
        return Report("sleep", [], [], ["nothing measured: torch finds no CUDA device"])
    model, tokenizer = random_model(options.model)
    results: list[dict[str, object]] = []
    for mode in MODES:
        show_progress(f"sleep: {options.cycles} cycles of {mode}")
        results.append(_cycles(model, tokenizer, mode, options))
    show_progress(f"sleep: {options.requests} requests")
    results.append(_requests(model, tokenizer, options))
    columns = ("what", "count", "freed_mib", "suspend_ms", "resume_ms", "left_mib")
    # a row's values are JSON's
    rows = [tuple(cast("Cell", row.get(column)) for column in columns) for row in results]
    return Report("sleep", [Table("Sleep and leaks", columns, rows)], results)


def _engine(model: Any, tokenizer: Any, options: argparse.Namespace, **settings: Any) -> Any:
    """Starts an engine. Any: megatron's model is untyped, settings are of several types."""
    from megallm import InferenceConfig, MegatronLLM  # noqa: PLC0415 - slow to import

    config = InferenceConfig(
        buffer_size_gb=options.cache_gb,
        max_requests=256,
        max_sequence_length=1024,
        max_tokens=4096,
        num_cuda_graphs=options.graphs,
        **settings,
    )
    return MegatronLLM(model=model, tokenizer=tokenizer, inference_config=config)


def _cycles(model: Any, tokenizer: Any, mode: str, options: argparse.Namespace) -> dict[str, object]:
    freed: list[int] = []
    suspends: list[float] = []
    resumes: list[float] = []
    with _engine(model, tokenizer, options, kv_cache_management_mode=mode) as llm:
        _generate(llm, 64, random.Random(SEED))
        before = after_first = _used()
        for cycle in range(options.cycles):
            awake = _used()
            suspends.append(_seconds(llm.suspend))
            freed.append(awake - _used())
            resumes.append(_seconds(llm.resume))
            llm.unpause()
            _generate(llm, 8, random.Random(cycle))
            if cycle == 0:
                after_first = _used()
        left = _used() - after_first
    return {
        "what": mode,
        "count": options.cycles,
        "freed_mib": significant(statistics.median(freed) / MIB),
        "suspend_ms": significant(statistics.median(suspends) * 1e3),
        "resume_ms": significant(statistics.median(resumes) * 1e3),
        "left_mib": significant(left / MIB),
        "left_since_start_mib": significant((left + after_first - before) / MIB),
    }


def _requests(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, object]:
    rng = random.Random(SEED)
    with _engine(model, tokenizer, options) as llm:
        _generate(llm, 512, rng)
        before = _used()
        _generate(llm, options.requests, rng)
        left = _used() - before
    return {"what": "requests", "count": options.requests, "left_mib": significant(left / MIB)}


def _generate(llm: Any, count: int, rng: random.Random) -> None:
    """Runs requests of a few tokens, some drawn with log-probs."""
    from megallm import SamplingParams  # noqa: PLC0415 - slow to import

    vocab = llm.engine.config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 64))] for _ in range(count)]
    params = [
        SamplingParams(
            temperature=0.0 if place % 2 else 0.9,
            top_p=0.9 if place % 3 == 0 else 0.0,
            return_log_probs=place % 4 == 0,
            num_tokens_to_generate=rng.randint(1, 8),
            ignore_eos=True,
        )
        for place in range(count)
    ]
    llm.generate(prompts, params, progress=False)


def _used() -> int:
    """Gives the bytes that the driver has lent out."""
    import torch  # noqa: PLC0415 - slow to import

    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
