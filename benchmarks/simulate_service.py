"""The service that is simulated: replicas behind a router, on a clock that stands still between events."""

import argparse
import asyncio
import heapq
from collections.abc import Iterator, Sequence
from typing import Any, Final

import anyio
import numpy as np

from benchmarks.report import show_progress, significant
from benchmarks.simulate_cost import CostModel
from benchmarks.simulate_replica import Replica
from benchmarks.simulate_trace import VOCAB_SIZE, Arrival
from megallm.core_async.actors.router import Router
from megallm.core_async.config import EngineConfig
from megallm.core_async.messages import (
    NewRequest,
    PrefixesChanged,
    RequestId,
    RequestsEnded,
    RouteRequests,
    Sampling,
    TextSpec,
    TokenBatch,
    unpack_ints,
)
from megallm.core_async.plan.prefix import ROOT, extend_keys
from megallm.core_async.plan.routing import RoutingPolicy, RoutingTable

PERCENTILES: Final = (50, 90, 99)
REPORTED_AT_ONCE: Final = 20_000
"""Requests that come or end between two lines of progress."""
GREEDY: Final = Sampling(temperature=0.0)


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
            keeps_cached=not options.ref_zero,
            vocab_size=VOCAB_SIZE,
        )
        self._config = config
        reports = (
            config.shares_prefixes and not options.no_reports and policy is not RoutingPolicy.LOAD_BALANCED
        )
        self.replicas = [Replica(config, cost, reports=reports) for _ in range(options.replicas)]
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
        self._num_routed = [0] * options.replicas
        self._num_prompt_tokens = 0
        self._num_shared_tokens = 0
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
                    show_progress(f"simulate: {self._now_s:.1f} s, {done}")
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
            "shared_percent": significant(100 * self._num_shared_tokens / self._num_prompt_tokens, 3),
            "prompt_tokens": self._num_prompt_tokens,
            "prefill_tokens": sum(each.prefill_tokens for each in stats),
            "requests_max_to_mean": _max_to_mean(self._num_routed),
            "tokens_max_to_mean": _max_to_mean(
                [each.prefill_tokens + each.generated_tokens for each in stats]
            ),
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
            extend_keys(keys, unpack_ints(arrival.prompt), self._config.block_size, ROOT)
        (rank,) = await self._router.address.ask(RouteRequests([key], [keys]))
        self._num_routed[rank] += 1
        self._num_prompt_tokens += arrival.num_prompt
        self._num_shared_tokens += arrival.num_shared
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
        replica = self.replicas[index]
        batch, next_s = await replica.turn(self._now_s)
        if next_s is not None:
            heapq.heappush(self._ends, (next_s, index))
        if (report := await replica.report()) is not None:
            self._router.address.tell(PrefixesChanged(index, report))
        if batch is None:
            return
        if batch.requests:
            self._latencies.add(batch, self._now_s)
        if batch.finished:
            self._num_ended += len(batch.finished)
            self._router.address.tell(RequestsEnded([each.request_id for each in batch.finished]))


def _max_to_mean(loads: Sequence[int]) -> float:
    return significant(max(loads) * len(loads) / sum(loads), 3)
