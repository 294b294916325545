"""A service of many replicas, simulated: who waits how long, and how much of the prompts is cached.

The schedulers, allocators and the router are the engine's own actors, and they do all of their
work: blocks, hashes, admissions, preemptions. The clock is virtual and the model is a table: what a
step takes comes from a measurement of this project, which is named below the tables. So a policy is
tried on 64 replicas in minutes, without a GPU.

Requests come at their times whether or not the service keeps up: when it does not, the times to the
first token grow with the length of the run, and say nothing else.
"""

import argparse
import asyncio
import heapq
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np

from benchmarks.measure import ROOT
from benchmarks.report import Report, Table, significant
from benchmarks.simulate_cost import CostModel
from benchmarks.simulate_replica import Replica
from benchmarks.simulate_trace import VOCAB_SIZE, Arrival, Recorded, Synthetic
from megallm.core_async.actors.router import Router
from megallm.core_async.config import EngineConfig
from megallm.core_async.messages import (
    NewRequest,
    RequestId,
    RequestsEnded,
    RouteRequests,
    Sampling,
    TextSpec,
    TokenBatch,
    unpack_ints,
)
from megallm.core_async.plan.prefix import ROOT as ROOT_KEY
from megallm.core_async.plan.prefix import extend_keys
from megallm.core_async.plan.routing import RoutingPolicy, RoutingTable

RESULTS: Final = ROOT / "benchmarks" / "results" / "h200_offline.jsonl"
PERCENTILES: Final = (50, 90, 99)
REPORTED_AT_ONCE: Final = 20_000
"""Requests that come or end between two lines of progress."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's options."""
    add = parser.add_argument
    add("--requests", type=int, default=10_000, metavar="N", help="default: %(default)s")
    add("--replicas", type=int, default=8, metavar="N", help="default: %(default)s")
    add(
        "--policies",
        nargs="+",
        choices=[str(policy) for policy in RoutingPolicy],
        default=[str(RoutingPolicy.LONGEST_PREFIX)],
        help="of the router, each on the same requests (default: longest_prefix)",
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
    add("--no-cache", action="store_true", help="without prefix caching")
    add("--batch", type=int, default=256, metavar="N", help="rows of a replica (default: %(default)s)")
    add("--step-tokens", type=int, default=2048, metavar="N", help="of a step (default: %(default)s)")
    add("--blocks", type=int, default=16_384, metavar="N", help="of a replica (default: %(default)s)")
    add("--block-size", type=int, default=16, metavar="N", help="tokens of a block (default: %(default)s)")
    add("--cost", type=Path, default=RESULTS, metavar="FILE", help="results of offline (default: the H200's)")
    add("--shape", default="shape-8b", help="the model in them (default: %(default)s)")


def run(options: argparse.Namespace) -> Report:
    """Simulates the service once for each policy."""
    cost = CostModel.read(options.cost, options.shape)
    results: list[dict[str, Any]] = []  # Any: cells of a table
    for policy in options.policies:
        print(f"simulate: {policy}, {options.replicas} replicas", file=sys.stderr)
        results.append({"policy": policy, "replicas": options.replicas, **simulate(options, cost, policy)})
    tables = [
        _table("The service", results, ("requests", "simulated_s", "output_tok_s", "busy_percent")),
        _table("Latency", results, tuple(key for key in results[0] if key.endswith("_ms"))),
        _table("The cache", results, ("hit_percent", "prefill_tokens", "preemptions")),
        _table("What the simulation took", results, ("steps", "wall_s", "cpu_s", "cpu_us_per_step")),
    ]
    by_rows = ", ".join(f"{rows}: {1e3 * seconds:.4g} ms" for rows, seconds in cost.decode_s)
    prompts = f"{cost.prompt_token_s * 1e6:.3g} us a token of a prompt"
    note = f"a step's cost is from {cost.source}: {prompts}, and by rows that decode {by_rows}"
    return Report("simulate", tables, [{**row, "cost_source": cost.source} for row in results], [note])


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
    ).arrivals()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still until it is set."""

    now_s = 0.0

    def time(self) -> float:
        """Gives the virtual time."""
        return self.now_s


class Latencies:
    """When tokens came, by request."""

    def __init__(self, num_requests: int) -> None:
        self.came_s = np.zeros(num_requests)
        self.first_s = np.full(num_requests, np.nan)
        self._last_s = np.full(num_requests, np.nan)
        self._gaps: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []

    def add(self, batch: TokenBatch, now_s: float) -> None:
        """Notes a step's tokens."""
        keys = np.array(batch.requests, dtype=np.int64)
        gaps = now_s - self._last_s[keys]
        is_first = np.isnan(gaps)
        self._last_s[keys] = now_s
        if is_first.any():
            self.first_s[keys[is_first]] = now_s
            gaps = gaps[~is_first]
        self._gaps.append(gaps)

    def figures(self) -> dict[str, float]:
        """Gives percentiles in milliseconds."""
        named = {
            "ttft": self.first_s - self.came_s,
            "itl": np.concatenate(self._gaps),
            "e2e": self._last_s - self.came_s,
        }
        return {
            f"{name}_p{percent}_ms": significant(float(np.percentile(seconds, percent)) * 1e3)
            for name, seconds in named.items()
            for percent in PERCENTILES
        }


class Service:
    """Replicas behind a router, and the order of events: what happens next happens at its time."""

    def __init__(self, options: argparse.Namespace, cost: CostModel, policy: RoutingPolicy) -> None:
        config = EngineConfig(
            block_size=options.block_size,
            num_blocks=options.blocks,
            max_requests=options.batch,
            max_tokens=max(options.step_tokens, options.batch),
            max_sequence_length=options.blocks * options.block_size,
            chunks_prompts=True,
            shares_prefixes=not options.no_cache,
            vocab_size=VOCAB_SIZE,
        )
        self._config = config
        self.replicas = [Replica(config, cost) for _ in range(options.replicas)]
        table = RoutingTable(
            options.replicas,
            policy=policy,
            alpha=options.alpha,
            max_requests=config.max_requests,
            max_keys=options.replicas * config.num_blocks,
        )
        self._router = Router(table)
        self._latencies = Latencies(options.requests)
        self._ends: list[tuple[float, int]] = []
        """A heap of (when, whose) of results to come."""
        self._num_ended = 0
        self._num_came = 0
        self._now_s = 0.0

    async def run(self, arrivals: Iterator[Arrival]) -> None:
        """Lets everything happen, until all requests have ended."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._router.run)
            for replica in self.replicas:
                await replica.start(tasks)
            arrival, reported = next(arrivals, None), 0
            while arrival is not None or self._ends:
                is_arrival = arrival is not None and (not self._ends or arrival.time_s <= self._ends[0][0])
                if arrival is not None and is_arrival:
                    self._now_s = loop.now_s = arrival.time_s
                    await self._come(arrival)
                    arrival = next(arrivals, None)
                else:
                    self._now_s, index = heapq.heappop(self._ends)
                    loop.now_s = self._now_s
                    await self._turn(index)
                if self._num_came + self._num_ended >= reported + REPORTED_AT_ONCE:
                    reported = self._num_came + self._num_ended
                    done = f"{self._num_came:,} requests came, {self._num_ended:,} have ended"
                    print(f"simulate: {self._now_s:.1f} s, {done}", file=sys.stderr)
            tasks.cancel_scope.cancel()
        assert self._num_ended == self._num_came, f"{self._num_ended} of {self._num_came} requests have ended"

    def figures(self) -> dict[str, Any]:  # Any: cells of a table
        """Gives what came of it."""
        stats = [replica.stats for replica in self.replicas]
        num_queried = sum(each.prefix_query_tokens for each in stats)
        num_generated = sum(each.generated_tokens for each in stats)
        busy_s = sum(replica.busy_s for replica in self.replicas)
        return {
            "requests": self._num_ended,
            "simulated_s": significant(self._now_s),
            "output_tok_s": significant(num_generated / self._now_s),
            "busy_percent": significant(100 * busy_s / self._now_s / len(self.replicas), 3),
            **self._latencies.figures(),
            "hit_percent": significant(
                100 * sum(each.prefix_hit_tokens for each in stats) / max(num_queried, 1), 3
            ),
            "prefill_tokens": sum(each.prefill_tokens for each in stats),
            "preemptions": sum(each.preemptions for each in stats),
            "steps": sum(replica.num_steps for replica in self.replicas),
        }

    async def _come(self, arrival: Arrival) -> None:
        """Routes a request and queues it where it goes."""
        key = RequestId(self._num_came)
        self._num_came += 1
        self._latencies.came_s[key] = arrival.time_s
        keys: list[bytes] = []
        if self._config.shares_prefixes:
            extend_keys(keys, unpack_ints(arrival.prompt), self._config.block_size, ROOT_KEY)
        (rank,) = await self._router.address.ask(RouteRequests([key], [keys]))
        replica = self.replicas[rank]
        request = NewRequest(
            request_id=key,
            prompt=arrival.prompt,
            max_new_tokens=arrival.num_new,
            stop_token_ids=(),
            sampling=GREEDY,
            text=TextSpec(key),
        )
        await replica.submit(request)
        if replica.is_idle:
            await self._turn(rank)

    async def _turn(self, index: int) -> None:
        batch, next_s = await self.replicas[index].turn(self._now_s)
        if next_s is not None:
            heapq.heappush(self._ends, (next_s, index))
        if batch is None:
            return
        if batch.requests:
            self._latencies.add(batch, self._now_s)
        if batch.finished:
            self._num_ended += len(batch.finished)
            self._router.address.tell(RequestsEnded([each.request_id for each in batch.finished]))


GREEDY: Final = Sampling(temperature=0.0)
