"""A service of many replicas, simulated: who waits how long, and how much of the prompts is cached.

The schedulers, allocators and the router are the engine's own actors, and they do all of their
work: blocks, hashes, admissions, preemptions. The clock is virtual and the model is a table: what a
step takes comes from a measurement of this project, which is named below the tables. So a policy is
tried on 64 replicas in minutes, without a GPU.

Requests come at their times whether or not the service keeps up: when it does not, the times to the
first token grow with the length of the run, and say nothing else.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anyio

from benchmarks.measure import ROOT
from benchmarks.report import Report, Table, show_progress, significant
from benchmarks.simulate_cost import CostModel
from benchmarks.simulate_service import Service, VirtualLoop
from benchmarks.simulate_trace import Arrival, Recorded, Synthetic
from megallm.core_async.plan.routing import RoutingPolicy

RESULTS: Final = ROOT / "benchmarks" / "results" / "h200_offline.jsonl"
ALL: Final = "all"
MEANING: Final = (
    "shared_percent is of the prompts' tokens, those of system prompts; prefill_tokens are the prompts'"
    " tokens that were computed; max_to_mean is the busiest replica's load over the mean: requests that were"
    " sent there, and tokens, of prompts and outputs, that were computed there"
)
ROUTING_COLUMNS: Final = (
    "prompt_tokens",
    "shared_percent",
    "hit_percent",
    "prefill_tokens",
    "requests_max_to_mean",
    "tokens_max_to_mean",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "output_tok_s",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add("--requests", type=int, default=10_000, metavar="N", help="default: %(default)s")
    add("--replicas", type=int, default=8, metavar="N", help="default: %(default)s")
    add(
        "--policies",
        nargs="+",
        choices=[*map(str, RoutingPolicy), ALL],
        default=[str(RoutingPolicy.LONGEST_PREFIX)],
        help="of the router, each on the same requests; all: one after the other (default: longest_prefix)",
    )
    add("--alpha", type=float, default=0.5, help="weight of the prefix, 0 to 1 (default: %(default)s)")
    add("--trace", type=Path, metavar="FILE", help="recorded requests, instead of made-up ones")
    add("--speed", type=float, default=1.0, help="how many times as fast FILE is played")
    add("--rate", type=float, default=30.0, help="requests a second and replica (default: %(default)s)")
    add("--input", type=int, default=512, metavar="N", help="tokens of a prompt (default: %(default)s)")
    add("--output", type=int, default=128, metavar="N", help="tokens of an output (default: %(default)s)")
    add("--shared-share", type=float, default=0.5, help="of requests with a system prompt (default: 0.5)")
    add("--shared-tokens", type=int, default=256, metavar="N", help="of a system prompt (default: 256)")
    add("--shared-prompts", type=int, default=64, metavar="N", help="system prompts (default: %(default)s)")
    add("--shared-beginning", type=int, default=0, metavar="N", help="tokens that all of those begin with")
    add("--shared-skew", type=float, default=0.0, metavar="X", help="the n-th comes as often as n ** -X says")
    add("--no-cache", action="store_true", help="without prefix caching")
    add("--ref-zero", action="store_true", help="a block that nobody holds is forgotten at once")
    add("--no-reports", action="store_true", help="the router knows of the caches only what it sent there")
    add("--batch", type=int, default=256, metavar="N", help="rows of a replica (default: %(default)s)")
    add("--step-tokens", type=int, default=2048, metavar="N", help="of a step (default: %(default)s)")
    add("--blocks", type=int, default=16_384, metavar="N", help="of a replica (default: %(default)s)")
    add("--block-size", type=int, default=16, metavar="N", help="tokens of a block (default: %(default)s)")
    add("--cost", type=Path, default=RESULTS, metavar="FILE", help="results of offline (default: the H200's)")
    add("--shape", default="shape-8b", help="the model in them (default: %(default)s)")


def run(options: argparse.Namespace) -> Report:
    """Simulates the service once for each policy."""
    if not 0 <= options.alpha <= 1:
        raise ValueError(f"alpha is {options.alpha}; it must be from 0 (load) to 1 (prefix)")
    cost = CostModel.read(options.cost, options.shape)
    results: list[dict[str, Any]] = []  # Any: cells of a table
    for policy in RoutingPolicy if ALL in options.policies else options.policies:
        show_progress(f"simulate: {policy}, {options.replicas} replicas")
        results.append({"policy": policy, "replicas": options.replicas, **simulate(options, cost, policy)})
    tables = [
        _table("Routing", results, ROUTING_COLUMNS),
        _table("The service", results, ("requests", "simulated_s", "busy_percent", "preemptions")),
        _table("Latency", results, tuple(key for key in results[0] if key.endswith("_ms"))),
        _table("What the simulation took", results, ("steps", "wall_s", "cpu_s", "cpu_us_per_step")),
    ]
    by_rows = ", ".join(f"{rows}: {1e3 * seconds:.4g} ms" for rows, seconds in cost.decode_s)
    prompts = f"{cost.prompt_token_s * 1e6:.3g} us a token of a prompt"
    source = f"a step's cost is from {cost.source}: {prompts}, and by rows that decode {by_rows}"
    asked = {"options": _asked(options), "cost_source": cost.source}
    return Report("simulate", tables, [{**row, **asked} for row in results], [source, MEANING])


def _asked(options: argparse.Namespace) -> dict[str, object]:
    """Gives the numbers, switches and files that make the run what it is."""
    return {
        key: value.name if isinstance(value, Path) else value
        for key, value in vars(options).items()
        if isinstance(value, int | float | Path) and key != "out"
    }


def _table(title: str, results: list[dict[str, Any]], columns: tuple[str, ...]) -> Table:
    columns = ("policy", *columns)
    return Table(title, columns, [tuple(row[column] for column in columns) for row in results])


def simulate(options: argparse.Namespace, cost: CostModel, policy: str) -> dict[str, Any]:
    """Gives the figures of one run. Any: cells of a table."""
    began, began_cpu = time.perf_counter(), time.thread_time()
    service = Service(options, cost, RoutingPolicy(policy))
    anyio.run(service.run, _arrivals(options), backend_options={"loop_factory": VirtualLoop})
    wall_s, cpu_s = time.perf_counter() - began, time.thread_time() - began_cpu
    figures = service.figures()
    return {
        **figures,
        "wall_s": significant(wall_s),
        "cpu_s": significant(cpu_s),
        "cpu_us_per_step": significant(cpu_s / figures["steps"] * 1e6),
    }


def _arrivals(options: argparse.Namespace) -> Iterator[Arrival]:
    if options.trace is not None:
        most = options.blocks * options.block_size
        return Recorded(options.trace, options.requests, options.speed, most).arrivals()
    return Synthetic(
        num_requests=options.requests,
        rate=options.rate * options.replicas,
        input_length=options.input,
        output_length=options.output,
        shared_share=options.shared_share,
        shared_length=options.shared_tokens,
        num_shared=options.shared_prompts,
        shared_beginning=options.shared_beginning,
        shared_skew=options.shared_skew,
    ).arrivals()
