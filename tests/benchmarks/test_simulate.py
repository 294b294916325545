"""The simulated service: it agrees with what was measured, every request ends, and a cache pays."""

import argparse
import json
import re
from collections import Counter
from pathlib import Path

import anyio
import pytest

from benchmarks.report import Report
from benchmarks.simulate import RESULTS, ROUTING_COLUMNS, add_arguments, run
from benchmarks.simulate_cost import CostModel
from benchmarks.simulate_replica import Replica
from benchmarks.simulate_service import VirtualLoop
from benchmarks.simulate_trace import HASH_TOKENS, Recorded, Synthetic
from megallm.core_async.config import EngineConfig
from megallm.core_async.messages import NewRequest, RequestId, Sampling, TextSpec, pack_ints, unpack_ints


def report_of(*arguments: str) -> Report:
    """Runs a small simulation."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(["--requests", "60", "--replicas", "3", "--output", "16", *arguments]))


def a_line(shape: str, *cases: tuple[str, float, float]) -> str:
    """Gives a line of results: (case, milliseconds of a step, tokens of prompts a second)."""
    results = [
        {"engine": "megallm", "shape": shape, "case": case, "step_ms": {"total": ms}, "prompt_tok_s": rate}
        for case, ms, rate in cases
    ]
    machine = {"gpus": list[str](), "cores": 2, "cpu": "some processor"}
    return json.dumps({"suite": "offline", "machine": machine, "results": results}) + "\n"


# ---- what a step costs ---------------------------------------------------------------------------


def test_the_cost_of_a_step_is_the_last_measurement_of_its_shape(tmp_path: Path) -> None:
    """And says which: a figure without its source can't be checked."""
    file = tmp_path / "results.jsonl"
    file.write_text(
        a_line("big", ("1:8:8", 9.0, 1.0))
        + a_line("big", ("10:8:8", 4.0, 500.0), ("30:8:8", 8.0, 1000.0))
        + a_line("small", ("1:8:8", 1.0, 1.0))
    )
    cost = CostModel.read(file, "big")
    expected = "results.jsonl, line 2: big on 2 cores of some processor, cases 10:8:8, 30:8:8"
    assert cost.source == expected
    assert cost.prompt_token_s == pytest.approx(0.001)
    table = cost.table(40)
    by_rows = {0: 0.0, 1: 0.004, 10: 0.004, 20: 0.006, 30: 0.008, 40: 0.010}
    assert {rows: table[rows] for rows in by_rows} == pytest.approx(by_rows)
    assert CostModel.read(file, "small").table(3) == pytest.approx([0.0, 0.001, 0.001, 0.001])


def test_a_shape_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    """Another model's cost would be believed."""
    file = tmp_path / "results.jsonl"
    file.write_text(a_line("big", ("mix", 9.0, 1.0)))
    with pytest.raises(ValueError, match=r"results.jsonl has no cases of 'small'; it has big"):
        CostModel.read(file, "small")


# ---- what is asked -------------------------------------------------------------------------------


def test_a_made_up_stream_keeps_its_rate_its_lengths_and_its_share() -> None:
    """What is asked of the service must be what the options say."""
    asked = Synthetic(2000, 50.0, 100, 20, shared_share=0.25, shared_length=40, num_shared=3)
    arrivals = list(asked.arrivals())
    assert len(arrivals) == 2000
    assert arrivals[-1].time_s == pytest.approx(40.0, rel=0.1)
    assert sorted(arrivals, key=lambda each: each.time_s) == arrivals
    assert sum(each.num_prompt for each in arrivals) / 2000 == pytest.approx(100, rel=0.05)
    assert sum(each.num_new for each in arrivals) / 2000 == pytest.approx(20, rel=0.05)
    heads = [each.prompt[:160] for each in arrivals if each.num_prompt > 40]
    counts = sorted(heads.count(head) for head in set(heads))
    assert len(counts) > 1000
    assert sum(counts[-3:]) / len(heads) == pytest.approx(0.25, abs=0.04)
    assert list(asked.arrivals()) == arrivals


def test_a_made_up_stream_shares_as_much_as_was_asked_for() -> None:
    """A claim about 80 % of shared tokens needs a stream that has them."""
    asked = Synthetic(500, 50.0, 100, 20, shared_share=1.0, shared_length=80, num_shared=4)
    arrivals = list(asked.arrivals())
    shared, whole = sum(each.num_shared for each in arrivals), sum(each.num_prompt for each in arrivals)
    assert shared / whole == pytest.approx(0.8, rel=0.02)
    assert {each.num_prompt - each.num_shared for each in arrivals} == set(range(10, 31))


def test_some_system_prompts_are_asked_for_more_often_and_all_begin_alike() -> None:
    """Popularity is what makes a balance hard, a common beginning what makes the first block say nothing."""
    asked = Synthetic(
        3000,
        50.0,
        100,
        20,
        shared_share=1.0,
        shared_length=40,
        num_shared=4,
        shared_beginning=8,
        shared_skew=1.0,
    )
    prompts = [unpack_ints(each.prompt) for each in asked.arrivals()]
    counts = Counter(tuple(prompt[:40]) for prompt in prompts)
    shares = [count / 3000 for _, count in counts.most_common()]
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.03)
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert len({prompt[8] for prompt in prompts}) == 4


def test_a_recorded_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Prompts with the same numbers begin alike, and end apart."""
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": HASH_TOKENS + 9, "output_length": 5, "hash_ids": [3]},
        {"timestamp": 3000, "input_length": HASH_TOKENS + 9, "output_length": 7, "hash_ids": [3]},
        {"timestamp": 4000, "input_length": 10_000, "output_length": 8},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third = Recorded(file, 10, speed=2.0, max_length=1000).arrivals()
    assert [each.time_s for each in (first, second, third)] == [0.0, 1.5, 2.0]
    assert [(each.num_prompt, each.num_new) for each in (first, second, third)] == [
        (HASH_TOKENS + 9, 5),
        (HASH_TOKENS + 9, 7),
        (992, 8),
    ]
    one, other = unpack_ints(first.prompt), unpack_ints(second.prompt)
    assert one[:HASH_TOKENS] == other[:HASH_TOKENS]
    assert one[HASH_TOKENS:] != other[HASH_TOKENS:]
    assert len(list(Recorded(file, 2).arrivals())) == 2


def test_a_line_that_is_no_request_is_named(tmp_path: Path) -> None:
    """A trace of a million lines is not searched by hand."""
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl, line 1: KeyError\('input_length'\); a line must be"):
        list(Recorded(file, 1).arrivals())


# ---- the service ---------------------------------------------------------------------------------


def test_every_request_ends_under_every_policy_and_the_source_of_the_cost_is_named() -> None:
    """All of them get all of their tokens, from the same requests."""
    report = report_of("--policies", "longest_prefix", "first_prefix_block", "load_balanced")
    assert [row["requests"] for row in report.results] == [60] * 3
    assert len({row["output_tok_s"] for row in report.results}) <= 3
    assert re.search(r"h200_offline.jsonl, line \d+: shape-8b on NVIDIA H200", report.notes[0])
    for row in report.results:
        assert str(row["cost_source"]) in report.notes[0]
        assert 0 < float(str(row["ttft_p50_ms"])) <= float(str(row["ttft_p99_ms"]))
        assert 0 < float(str(row["itl_p50_ms"])) <= float(str(row["e2e_p50_ms"]))


def test_a_shared_prefix_is_found_where_the_router_sends_it() -> None:
    """Routing by load spreads a prompt over all replicas, and each computes it."""
    arguments = ("--shared-share", "1", "--shared-tokens", "400", "--shared-prompts", "3", "--alpha", "0.9")
    report = report_of(*arguments, "--policies", "longest_prefix", "load_balanced")
    by_prefix, by_load = (float(str(row["hit_percent"])) for row in report.results)
    (off,) = report_of(*arguments, "--no-cache").results
    assert by_prefix > by_load > 0
    assert off["hit_percent"] == 0
    assert int(str(report.results[0]["prefill_tokens"])) < int(str(off["prefill_tokens"])) / 2


def test_routing_by_prefix_halves_what_is_computed_and_keeps_the_balance() -> None:
    """Four caches hold between them what none of them holds alone."""
    report = report_of(
        *("--requests", "300", "--replicas", "4", "--rate", "30", "--output", "4", "--policies", "all"),
        *("--shared-share", "1", "--input", "1280", "--shared-tokens", "1024", "--shared-prompts", "20"),
        *("--block-size", "64", "--blocks", "256"),
    )
    by_policy = {
        row["policy"]: {key: float(str(row[key])) for key in ROUTING_COLUMNS} for row in report.results
    }
    by_prefix, by_load = by_policy["longest_prefix"], by_policy["load_balanced"]
    assert by_prefix["shared_percent"] == pytest.approx(80, abs=1)
    assert by_prefix["prompt_tokens"] == by_load["prompt_tokens"]
    assert by_load["prefill_tokens"] > 2 * by_prefix["prefill_tokens"]
    for figures in by_policy.values():
        assert 1 <= figures["requests_max_to_mean"] < 1.3
        assert 1 <= figures["tokens_max_to_mean"] < 1.3


def test_what_replicas_report_spares_a_router_what_they_no_longer_have() -> None:
    """Without a cache of what nobody holds, almost all that was sent somewhere is gone from there."""
    arguments = ("--requests", "150", "--ref-zero", "--shared-share", "1", "--shared-prompts", "8")
    (told,), (untold,) = report_of(*arguments).results, report_of(*arguments, "--no-reports").results
    assert told["requests"] == untold["requests"] == 150
    assert float(str(told["requests_max_to_mean"])) < float(str(untold["requests_max_to_mean"]))


def test_a_weight_that_is_none_is_refused() -> None:
    """Before an hour of simulation."""
    with pytest.raises(ValueError, match=r"alpha is 1.5; it must be from 0 \(load\) to 1 \(prefix\)"):
        report_of("--alpha", "1.5")


def test_a_recorded_trace_can_be_played(tmp_path: Path) -> None:
    """The service that was recorded is the one to be tried on."""
    file = tmp_path / "trace.jsonl"
    row = {"timestamp": 5, "input_length": 900, "output_length": 5, "hash_ids": [3]}
    file.write_text(json.dumps(row) + "\n")
    (result,) = report_of("--trace", str(file)).results
    assert (result["requests"], result["prefill_tokens"]) == (1, 900)


@pytest.mark.parametrize(("shape", "num_rows", "measured"), [("shape-8b", 128, 6935), ("shape-8b", 32, 4272)])
def test_a_batch_that_was_measured_takes_as_long_in_the_simulation(
    shape: str, num_rows: int, measured: float
) -> None:
    """The cost model and the engine's own order of work give the throughput they were taken from."""
    cost = CostModel.read(RESULTS, shape)
    config = EngineConfig(
        block_size=256,
        num_blocks=4 * num_rows,
        max_requests=num_rows,
        max_tokens=16_384,
        max_sequence_length=1024,
        vocab_size=10,
    )
    replica = Replica(config, cost)
    ended: list[float] = []

    async def decode() -> None:
        async with anyio.create_task_group() as tasks:
            await replica.start(tasks)
            for key in map(RequestId, range(num_rows)):
                prompt = pack_ints([1] * 512)
                await replica.submit(
                    NewRequest(key, prompt, 128, (), Sampling(temperature=0.0), TextSpec(key))
                )
            now_s: float | None = 0.0
            while now_s is not None:
                ended.append(now_s)
                _, now_s = await replica.turn(now_s)
            tasks.cancel_scope.cancel()

    anyio.run(decode, backend_options={"loop_factory": VirtualLoop})
    assert replica.stats.generated_tokens == num_rows * 128
    assert num_rows * 128 / ended[-1] == pytest.approx(measured, rel=0.1)
