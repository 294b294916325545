"""Log-probs beside a plain forward pass, on a CPU."""

import argparse

import torch

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
    assert row["clear"] == "8/8"
    assert str(row["same"]).partition("/")[0] == str(row["same"]).partition("/")[2]


def test_a_token_counts_where_both_passes_can_tell() -> None:
    """A lead within the plain pass's errors says nothing about the engine."""
    reference = torch.tensor([[0.0, 1.0, 0.2], [0.0, 0.5, 0.45], [3.0, 0.0, 0.0]])
    plain = reference + torch.tensor([[0.0, 0.1, 0.0], [0.0, 0.0, 0.1], [0.0, 0.0, 0.0]])
    assert numerics.clear_tokens(plain, reference, [1, 2, 0]) == (2, 2)
    assert numerics.clear_tokens(plain, reference, [1, 2, 1]) == (1, 2)
    assert numerics.same_tokens(plain, [1, 2, 1]) == (2, 3)
