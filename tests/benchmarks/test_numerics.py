"""Log-probs beside a plain forward pass, on a CPU."""

import argparse

from benchmarks import numerics


def test_engine_is_next_to_the_plain_pass() -> None:
    """On a CPU both are float32: what is far apart there is wrong, and not rounded."""
    parser = argparse.ArgumentParser()
    numerics.add_arguments(parser)
    words = ["--models", "head-128", "--prompts", "2", "--input", "9", "--output", "4"]
    report = numerics.run(parser.parse_args(words))
    (row,) = report.results
    assert row["tokens"] == 8
    assert isinstance(row["max_abs"], float)
    assert row["max_abs"] < 1e-3
    assert row["fp32_plain"] == 0
    assert str(row["same"]).partition("/")[0] == str(row["same"]).partition("/")[2]
