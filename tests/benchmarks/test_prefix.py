"""The prefix suite on a model of two tiny layers."""

import argparse
from pathlib import Path

import pytest

from benchmarks import prefix
from tests.models.tiny_gguf import write_tiny


def test_the_same_answers_come_with_less_work(tmp_path: Path) -> None:
    """What is computed is counted, not estimated; times of a tiny model mean nothing."""
    path = tmp_path / "tiny.gguf"
    write_tiny(path)
    parser = argparse.ArgumentParser()
    prefix.add_arguments(parser)
    sizes = [
        "--system",
        "33",
        "--questions",
        "5",
        "--question-tokens",
        "3",
        "--output",
        "2",
        "--block-size",
        "4",
    ]
    report = prefix.run(parser.parse_args(["--model", str(path), "--threads", "1", *sizes]))
    off, on, ratios = report.results
    assert (off["cache"], off["prefill_tokens"]) == ("off", 5 * 36)
    assert (on["cache"], on["prefill_tokens"]) == ("on", 36 + 4 * 4)
    assert ratios["prefill_tokens_saved_percent"] == pytest.approx(100 * (1 - 52 / 180), rel=0.01)
    assert float(str(ratios["mean_ttft_ratio"])) > 0
