"""What `/metrics` tells Prometheus: the engine's figures, and what the front ends saw of the requests.

prometheus_client joins the figures of several processes through files of one directory, which it takes
from the process's environment; see `share_figures`.
"""

import bisect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, values
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from megallm.core_async.messages import EngineStats
from megallm.http.engine_collector import PREFIX, EngineCollector

FINISH_REASONS = ("stop", "length", "abort", "error")
"""Counted from the start, so that the first one of a kind is a rise and no new series."""

TOKEN_BUCKETS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000]
COUNT_BUCKETS = [1, 2, 5, 10, 20, 50, 100]
FIRST_TOKEN_BUCKETS = [
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
]
INTER_TOKEN_BUCKETS = [
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.2,
    0.5,
    1,
    2.5,
]
REQUEST_BUCKETS = [
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
]


MAX_GATHERED = 64
"""Tokens that a process counts for itself alone, until it tells the others."""


class Metrics:
    """One front end's counts; its scrape also gives those of the others that share a directory.

    Everything is called in the front end's loop, and nothing waits.
    """

    def __init__(
        self, stats: Callable[[], EngineStats], model_name: str, directory: Path | None = None
    ) -> None:
        """Counts from zero.

        Args:
            stats: Gives the engine's figures.
            model_name: The label of every series.
            directory: Where the front ends of one server keep their counts; an empty one, there
                before the first front end. None: this process is the only one.
        """
        if directory is not None:
            share_figures(directory)
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(stats, model_name))
        if directory is not None:
            MultiProcessCollector(self._registry, path=str(directory))
        # what the processes share comes out of the files, so the counters themselves stay unregistered
        self._own = self._registry if directory is None else None
        self._model_name = model_name
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of the prompts that came.")
        success = Counter(
            f"{PREFIX}request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._own,
        )
        self._ended = {reason: success.labels(model_name, reason) for reason in FINISH_REASONS}
        self._request_success = success
        self._request_prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request that ended.", TOKEN_BUCKETS
        )
        self._request_generation = self._histogram(
            "request_generation_tokens", "Tokens generated for a request that ended.", TOKEN_BUCKETS
        )
        self._params_n = self._histogram("request_params_n", "What requests asked as n.", COUNT_BUCKETS)
        self._params_max_tokens = self._histogram(
            "request_params_max_tokens", "What requests asked as max_tokens.", TOKEN_BUCKETS
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", FIRST_TOKEN_BUCKETS
        )
        self._inter_token = _ManyHistogram(
            f"{PREFIX}inter_token_latency_seconds",
            "From one token to the next.",
            ["model_name"],
            registry=self._own,
            buckets=INTER_TOKEN_BUCKETS,
        ).labels(model_name)
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", REQUEST_BUCKETS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From the request to its first step.", FIRST_TOKEN_BUCKETS
        )

    # ---- what the routes tell ------------------------------------------------------------------

    def add_request(self, num_prompt_tokens: int, n: int, max_tokens: int | None) -> None:
        """Counts a request that is about to be queued; None: it asked for no limit."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._params_n.observe(n)
        if max_tokens is not None:
            self._params_max_tokens.observe(max_tokens)

    def first_token(self, seconds: float) -> None:
        """Counts a first token, so long after its request came."""
        self._first_token.observe(seconds)

    def tokens(self, num: int, seconds: float) -> None:
        """Counts tokens that came together, so long after the one before them.

        Others see the last few of them once a request has ended.
        """
        self._inter_token.observe_many(seconds / num, num)

    def finished(
        self,
        finish_reason: str,
        num_prompt_tokens: int,
        num_output_tokens: int,
        e2e_s: float,
        queue_s: float | None,
    ) -> None:
        """Counts a request that ended; None: it never got as far as a step."""
        self._inter_token.settle()
        ended = self._ended.get(finish_reason)
        if ended is None:
            ended = self._request_success.labels(self._model_name, finish_reason)
        ended.inc()
        self._request_prompt.observe(num_prompt_tokens)
        self._request_generation.observe(num_output_tokens)
        self._e2e.observe(e2e_s)
        if queue_s is not None:
            self._queue.observe(queue_s)

    def render(self) -> tuple[bytes, str]:
        """Gives the body of `/metrics`, and its content type."""
        self._inter_token.settle()
        return generate_latest(_Shown(self._registry)), CONTENT_TYPE_PLAIN_1_0_0

    # ---- construction --------------------------------------------------------------------------

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(PREFIX + name, what, ["model_name"], registry=self._own).labels(self._model_name)

    def _histogram(self, name: str, what: str, buckets: list[int] | list[float]) -> Histogram:
        return Histogram(PREFIX + name, what, ["model_name"], registry=self._own, buckets=buckets).labels(
            self._model_name
        )


class _ManyHistogram(Histogram):
    """A histogram that counts values by itself first: each count in a shared file takes some microseconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: as prometheus_client has it
        super().__init__(*args, **kwargs)
        self._gathered: dict[int, int] = {}
        """Values to be counted yet, by their bucket."""
        self._gathered_sum = 0.0
        self._num_gathered = 0

    def observe_many(self, amount: float, num: int) -> None:
        """Does what `observe` does, `num` times; `settle` shows it, which is called every so often."""
        place = bisect.bisect_left(self._upper_bounds, amount)
        self._gathered[place] = self._gathered.get(place, 0) + num
        self._gathered_sum += amount * num
        self._num_gathered += num
        if self._num_gathered >= MAX_GATHERED:
            self.settle()

    def settle(self) -> None:
        """Counts what was gathered."""
        gathered, self._gathered, self._num_gathered = self._gathered, {}, 0
        # prometheus_client does not annotate its values
        for place, num in gathered.items():
            self._buckets[place].inc(num)  # pyright: ignore[reportUnknownMemberType]
        if gathered:
            self._sum.inc(self._gathered_sum)  # pyright: ignore[reportUnknownMemberType]
            self._gathered_sum = 0.0


class _Shown(Collector):
    """A registry without the times at which the series were made, which nobody reads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def share_figures(directory: Path) -> None:
    """Makes every count of this process, made from now on, live in a file of the directory.

    prometheus_client decides this once, by an environment variable, while it is imported; to name the
    directory here works whoever imported it before. A process has one directory. The file is
    `KIND_PID.db` and outlives its process, so counts never fall when a front end is replaced; who made
    the directory removes it.

    Raises: ValueError when the process shares its figures in another directory already.
    """
    before = os.environ.get(DIRECTORY_VARIABLE)
    if before not in {None, str(directory)}:
        raise ValueError(
            f"this process keeps its figures in {before}, and {directory} is asked for; a process has"
            f" one directory: unset {DIRECTORY_VARIABLE}, or start another process"
        )
    os.environ[DIRECTORY_VARIABLE] = str(directory)
    if values.ValueClass is values.MutexValue:
        values.ValueClass = values.MultiProcessValue()  # pyright: ignore[reportUnknownMemberType] - no annotation


DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""What prometheus_client calls it."""
