"""What suspend gives back, what resume takes, and what is left behind by many cycles and many requests.

Memory is what the driver has lent out (`torch.cuda.mem_get_info`), so a leak in any library shows; of
many requests what torch's allocator keeps for the next step does not count. Host memory is the process's
resident size. With offload a prefix cache is filled first, so that there are contents
to move: GB/s are their bytes by the time of a whole suspend and a whole resume. Needs a CUDA device.
"""

import argparse
import random
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from benchmarks.load import SEED, random_prompts
from benchmarks.report import Cell, Report, Table, show_progress, significant
from benchmarks.shapes import SHAPES, random_model

MODES: Final = ("offload", "recompute")
MIB: Final = 1 << 20
COLUMNS: Final = (
    "what",
    "count",
    "freed_mib",
    "contents_mib",
    "suspend_ms",
    "resume_ms",
    "suspend_gb_s",
    "resume_gb_s",
    "left_mib",
    "left_host_mib",
)
MAX_SEQUENCE: Final = 1024
BLOCK: Final = 64
"""Tokens of a block."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add("--model", default="shape-0.6b", help=f"random weights: {', '.join(SHAPES)} (default: %(default)s)")
    add("--cycles", type=int, default=200, metavar="N", help="default: %(default)s")
    add("--requests", type=int, default=10_000, metavar="N", help="default: %(default)s")
    add("--graphs", type=int, default=None, metavar="N", help="num_cuda_graphs (default: as many as pay)")
    add("--cache-gb", type=float, default=8.0, metavar="GB", help="default: %(default)s")
    add(
        "--contents-gb",
        type=float,
        default=2.0,
        metavar="GB",
        help="what a prefix holds of it, with offload (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> Report:
    """Measures both modes, then the requests in the engine of the last."""
    import torch  # noqa: PLC0415 - takes seconds, which `--help` need not wait for

    if not torch.cuda.is_available():
        return Report("sleep", [], [], ["nothing measured: torch finds no CUDA device"])
    model, tokenizer = random_model(options.model)
    results: list[dict[str, object]] = []
    for mode in MODES:
        show_progress(f"sleep: {options.cycles} cycles of {mode}")
        with _engine(model, tokenizer, mode, options) as llm:
            results.append(_cycles(llm, mode, options))
            if mode == MODES[-1]:
                show_progress(f"sleep: {options.requests} requests")
                results.append(_requests(llm, options))
    # a row's values are JSON's
    rows = [tuple(cast("Cell", row.get(column)) for column in COLUMNS) for row in results]
    return Report("sleep", [Table("Sleep and leaks", COLUMNS, rows)], results)


def _engine(model: Any, tokenizer: Any, mode: str, options: argparse.Namespace) -> Any:
    """Starts an engine. Any: megatron's model is untyped."""
    from megatron.core.inference.config import (  # noqa: PLC0415 - slow to import
        KVCacheManagementMode,
        PrefixCachingEvictionPolicy,
    )

    from megallm import InferenceConfig, MegatronLLM  # noqa: PLC0415 - slow to import

    config = InferenceConfig(
        kv_cache_management_mode=KVCacheManagementMode(mode),
        enable_prefix_caching=True,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
        block_size_tokens=BLOCK,
        buffer_size_gb=options.cache_gb,
        max_requests=256,
        max_sequence_length=MAX_SEQUENCE,
        max_tokens=4096,
        num_cuda_graphs=options.graphs,
    )
    return MegatronLLM(model=model, tokenizer=tokenizer, inference_config=config)


def _cycles(llm: Any, mode: str, options: argparse.Namespace) -> dict[str, object]:
    freed: list[int] = []
    contents: list[int] = []
    suspends: list[float] = []
    resumes: list[float] = []
    _generate(llm, 64, random.Random(SEED), max_new=8)
    if mode == "offload":
        _fill(llm, options)
    before = after_first = _used()
    host_after_first = _host_bytes()
    for cycle in range(options.cycles):
        awake = _used()
        contents.append(_contents(llm, options))
        suspends.append(_seconds(llm.suspend))
        freed.append(awake - _used())
        resumes.append(_seconds(llm.resume))
        llm.unpause()
        _generate(llm, 4, random.Random(cycle), max_new=2)
        if cycle == 0:
            after_first, host_after_first = _used(), _host_bytes()
    left = _used() - after_first
    suspend_s, resume_s = statistics.median(suspends), statistics.median(resumes)
    result: dict[str, object] = {
        "what": mode,
        "count": options.cycles,
        "freed_mib": significant(statistics.median(freed) / MIB),
        "suspend_ms": significant(suspend_s * 1e3),
        "resume_ms": significant(resume_s * 1e3),
        "first_suspend_ms": significant(suspends[0] * 1e3),
        "left_mib": significant(left / MIB),
        "left_since_start_mib": significant((left + after_first - before) / MIB),
        "left_host_mib": significant((_host_bytes() - host_after_first) / MIB),
    }
    if mode == "offload":
        moved = statistics.median(contents)
        result["contents_mib"] = significant(moved / MIB)
        result["suspend_gb_s"] = significant(moved / suspend_s / 1e9)
        result["resume_gb_s"] = significant(moved / resume_s / 1e9)
    return result


def _requests(llm: Any, options: argparse.Namespace) -> dict[str, object]:
    rng = random.Random(SEED)
    _generate(llm, 512, rng, max_new=8)
    before, host_before = _held(), _host_bytes()
    _generate(llm, options.requests, rng, max_new=8)
    return {
        "what": "requests",
        "count": options.requests,
        "left_mib": significant((_held() - before) / MIB),
        "left_host_mib": significant((_host_bytes() - host_before) / MIB),
    }


def _fill(llm: Any, options: argparse.Namespace) -> None:
    """Has prompts computed whose blocks a prefix finds from then on: `contents_gb` of them."""
    from megallm import SamplingParams  # noqa: PLC0415 - slow to import

    length = MAX_SEQUENCE - BLOCK + 1
    num_blocks = round(options.contents_gb * 1e9 / _block_bytes(options))
    prompts = random_prompts((length,) * -(-num_blocks // (length // BLOCK)), llm.engine.config.vocab_size)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=1, ignore_eos=True)
    llm.generate(prompts, params, progress=False)


def _contents(llm: Any, options: argparse.Namespace) -> int:
    """Gives the bytes of the blocks that hold something."""
    stats = llm.engine.stats()
    return (stats.used_blocks + stats.cached_blocks) * _block_bytes(options)


def _block_bytes(options: argparse.Namespace) -> int:
    size = SHAPES[options.model]
    return BLOCK * size.num_layers * 2 * size.num_kv_heads * size.head_dim * 2  # bfloat16


def _generate(llm: Any, count: int, rng: random.Random, *, max_new: int) -> None:
    """Runs requests of a few tokens, some drawn with log-probs."""
    from megallm import SamplingParams  # noqa: PLC0415 - slow to import

    vocab = llm.engine.config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 64))] for _ in range(count)]
    params = [
        SamplingParams(
            temperature=0.0 if place % 2 else 0.9,
            top_p=0.9 if place % 3 == 0 else 0.0,
            return_log_probs=place % 4 == 0,
            num_tokens_to_generate=rng.randint(1, max_new),
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


def _held() -> int:
    """Gives the same without what torch's allocator keeps for the next step."""
    import torch  # noqa: PLC0415 - slow to import

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return _used()


def _host_bytes() -> int:
    """Gives the bytes that the process has in RAM; the driver may not count what is pinned there."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
