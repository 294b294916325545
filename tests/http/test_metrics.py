"""What `/metrics` tells Prometheus, from one process and from several."""

import subprocess
import sys
import textwrap
from pathlib import Path

from megallm.core_async.messages import EngineStats
from megallm.http.metrics import Metrics
from tests.http.scrapes import samples_of

ROOT = Path(__file__).parents[2]


def scrape(metrics: Metrics) -> dict[str, float]:
    """Gives what Prometheus would read."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=")
    return samples_of(body)


def test_a_request_leaves_its_counts() -> None:
    """These are what a dashboard shows, and what an autoscaler acts on."""
    metrics = Metrics(EngineStats, "m")
    metrics.add_request(10, 2, 64)
    metrics.add_request(5, 1, None)
    metrics.first_token(0.3)
    metrics.tokens(4, 0.2)
    metrics.finished("length", 10, 64, 1.5, 0.01)
    metrics.finished("tool_calls", 5, 7, 0.5, None)
    samples = scrape(metrics)
    counts = {name.removeprefix("megallm:"): value for name, value in samples.items() if value}
    assert {name: value for name, value in counts.items() if "{le=" not in name} == {
        "prompt_tokens_total": 15,
        "request_success_total{finished_reason=length}": 1,
        "request_success_total{finished_reason=tool_calls}": 1,
        "request_prompt_tokens_count": 2,
        "request_prompt_tokens_sum": 15,
        "request_generation_tokens_count": 2,
        "request_generation_tokens_sum": 71,
        "request_params_n_count": 2,
        "request_params_n_sum": 3,
        "request_params_max_tokens_count": 1,
        "request_params_max_tokens_sum": 64,
        "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 0.3,
        "inter_token_latency_seconds_count": 4,
        "inter_token_latency_seconds_sum": 0.2,
        "e2e_request_latency_seconds_count": 2,
        "e2e_request_latency_seconds_sum": 2.0,
        "request_queue_time_seconds_count": 1,
        "request_queue_time_seconds_sum": 0.01,
    }
    assert samples["megallm:inter_token_latency_seconds_bucket{le=0.05}"] == 4  # a bound is inside
    assert samples["megallm:inter_token_latency_seconds_bucket{le=0.03}"] == 0


def test_times_beyond_every_bound_are_counted_too() -> None:
    """A stall is what one looks for in this figure."""
    metrics = Metrics(EngineStats, "m")
    metrics.tokens(2, 200.0)
    samples = scrape(metrics)
    assert samples["megallm:inter_token_latency_seconds_bucket{le=2.5}"] == 0
    assert samples["megallm:inter_token_latency_seconds_bucket{le=+Inf}"] == 2


def test_the_reasons_are_there_before_a_request_ends() -> None:
    """A series that begins at 1 looks to Prometheus as if nothing had happened."""
    samples = scrape(Metrics(EngineStats, "m"))
    reasons = {name for name in samples if name.startswith("megallm:request_success_total")}
    assert reasons == {
        f"megallm:request_success_total{{finished_reason={reason}}}"
        for reason in ("stop", "length", "abort", "error")
    }


def test_the_engine_is_read_at_each_scrape() -> None:
    """A figure kept from the start would be wrong for ever."""
    stats = [EngineStats(running=1)]
    metrics = Metrics(lambda: stats[0], "m")
    assert scrape(metrics)["megallm:num_requests_running"] == 1
    stats[0] = EngineStats(running=7)
    assert scrape(metrics)["megallm:num_requests_running"] == 7


def test_two_servers_of_a_process_count_apart() -> None:
    """Nothing is registered for the whole process."""
    first, second = Metrics(EngineStats, "a"), Metrics(EngineStats, "b")
    first.add_request(3, 1, None)
    assert scrape(first)["megallm:prompt_tokens_total"] == 3
    assert scrape(second)["megallm:prompt_tokens_total"] == 0


def test_when_series_were_made_is_left_out() -> None:
    """A third of the lines would be times that nobody reads."""
    assert b"_created" not in Metrics(EngineStats, "m").render()[0]


SHARING = """
import sys
from pathlib import Path
from megallm.core_async.messages import EngineStats
from megallm.http.metrics import Metrics

metrics = Metrics(lambda: EngineStats(running=5), "m", Path(sys.argv[1]))
metrics.add_request(int(sys.argv[2]), 1, 8)
metrics.tokens(2, 0.1)
metrics.finished("stop", int(sys.argv[2]), 3, 0.5, 0.1)
sys.stdout.buffer.write(metrics.render()[0])
metrics.tokens(100, 5.0)
"""


def run_front_end(code: str, *args: str) -> subprocess.CompletedProcess[bytes]:
    """Runs what stands for a front-end process to its end."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        capture_output=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
        check=False,
    )


def test_front_ends_that_share_a_directory_give_their_sum(tmp_path: Path) -> None:
    """A scrape meets any one of them; counts of one that has ended stay, or a rate would turn negative."""
    first = run_front_end(SHARING, str(tmp_path), "10")
    assert samples_of(first.stdout)["megallm:prompt_tokens_total"] == 10, first.stderr
    second = samples_of(run_front_end(SHARING, str(tmp_path), "32").stdout)
    assert second["megallm:prompt_tokens_total"] == 42
    assert second["megallm:request_success_total{finished_reason=stop}"] == 2
    assert second["megallm:e2e_request_latency_seconds_count"] == 2
    assert second["megallm:inter_token_latency_seconds_count"] == 2 + 100 + 2
    assert second["megallm:e2e_request_latency_seconds_bucket{le=0.5}"] == 2
    assert second["megallm:num_requests_running"] == 5  # the engine's, which each of them knows


def test_a_process_has_one_directory(tmp_path: Path) -> None:
    """Counts of two servers in one file could not be told apart."""
    code = SHARING + 'Metrics(EngineStats, "m", Path(sys.argv[1]) / "other")\n'
    ended = run_front_end(code, str(tmp_path), "10")
    assert ended.returncode == 1
    assert f"keeps its figures in {tmp_path}, and {tmp_path}/other is asked for" in ended.stderr.decode()
