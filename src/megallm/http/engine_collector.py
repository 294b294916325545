"""The engine's own figures for Prometheus, read when somebody asks for them. Knows no HTTP."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megallm.core_async.messages import EngineStats, StepSplit

PREFIX = "megallm:"
"""Of every name; what follows it is what vLLM calls the same figure."""


class EngineCollector(Collector):
    """Gives what the engine said after its last step. Every front end of an engine gives the same."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """Gives the figures of one moment."""
        stats = self._stats()
        num_blocks = stats.used_blocks + stats.cached_blocks + stats.free_blocks
        usage = stats.used_blocks / num_blocks if num_blocks else 0.0
        yield self._gauge("num_requests_running", "Requests that the steps compute.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests that wait to be admitted.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Part of the KV cache in use; 1 is all.", usage)
        yield self._counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_query_tokens
        )
        yield self._counter("prefix_cache_hits", "Tokens found there.", stats.prefix_hit_tokens)
        yield self._counter("num_preemptions", "Requests that gave their blocks up.", stats.preemptions)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield self._counter("steps", "Steps planned.", stats.step)
        yield self._counter("graph_hits", "Steps replayed from a captured graph.", stats.captured_steps)
        yield self._split(
            CounterMetricFamily, "step_time_seconds", "Time of all steps, by part.", stats.all_steps
        )
        yield self._split(
            GaugeMetricFamily, "last_step_time_seconds", "Time of the last step, by part.", stats.last_step
        )

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, what, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, what, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _split(
        self,
        family_type: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        what: str,
        split: StepSplit,
    ) -> Metric:
        family = family_type(PREFIX + name, what, labels=["model_name", "part"])
        for part in StepSplit.__struct_fields__:
            family.add_metric([self._model_name, part.removesuffix("_s")], getattr(split, part))
        return family
