"""The engine's own figures for Prometheus."""

from prometheus_client import CollectorRegistry, generate_latest

from megallm.core_async.messages import EngineStats, StepSplit
from megallm.http.engine_collector import EngineCollector
from tests.http.scrapes import samples_of

STATS = EngineStats(
    step=9,
    running=3,
    waiting=2,
    used_blocks=6,
    cached_blocks=1,
    free_blocks=5,
    preemptions=4,
    prefix_query_tokens=100,
    prefix_hit_tokens=40,
    generated_tokens=77,
    captured_steps=8,
    last_step=StepSplit(0.1, 0.2, 0.3, 0.4, 0.5),
    all_steps=StepSplit(1, 2, 3, 4, 5),
)


def scrape(collector: EngineCollector) -> bytes:
    """Gives what Prometheus would get."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


def test_the_names_are_those_that_dashboards_know() -> None:
    """A dashboard made for vLLM should need a change of prefix and nothing else."""
    assert samples_of(scrape(EngineCollector(lambda: STATS, "m"))) == {
        "megallm:num_requests_running": 3,
        "megallm:num_requests_waiting": 2,
        "megallm:kv_cache_usage_perc": 0.5,
        "megallm:prefix_cache_queries_total": 100,
        "megallm:prefix_cache_hits_total": 40,
        "megallm:num_preemptions_total": 4,
        "megallm:generation_tokens_total": 77,
        "megallm:steps_total": 9,
        "megallm:graph_hits_total": 8,
        "megallm:step_time_seconds_total{part=plan}": 1,
        "megallm:step_time_seconds_total{part=prepare}": 2,
        "megallm:step_time_seconds_total{part=forward}": 3,
        "megallm:step_time_seconds_total{part=sample}": 4,
        "megallm:step_time_seconds_total{part=post}": 5,
        "megallm:last_step_time_seconds{part=plan}": 0.1,
        "megallm:last_step_time_seconds{part=prepare}": 0.2,
        "megallm:last_step_time_seconds{part=forward}": 0.3,
        "megallm:last_step_time_seconds{part=sample}": 0.4,
        "megallm:last_step_time_seconds{part=post}": 0.5,
    }


def test_every_series_names_its_model() -> None:
    """One Prometheus watches many servers."""
    lines = [line for line in scrape(EngineCollector(EngineStats, 'a "b"')).splitlines() if line[:1] != b"#"]
    assert all(b'model_name="a \\"b\\""' in line for line in lines)


def test_an_engine_without_blocks_uses_none_of_them() -> None:
    """Before the first step there may be nothing to divide by."""
    samples = samples_of(scrape(EngineCollector(EngineStats, "m")))
    assert samples["megallm:kv_cache_usage_perc"] == 0
