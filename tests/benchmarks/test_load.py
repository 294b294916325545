"""The work that a case names is the same everywhere."""

import pytest

from benchmarks.load import Case


def test_a_case_is_so_many_prompts_of_one_length() -> None:
    """B:I:O is how every figure of the project is named."""
    case = Case.parse("3:5:7")
    assert (case.name, case.prompt_lengths, case.output_lengths) == ("3:5:7", (5, 5, 5), (7, 7, 7))
    assert (case.num_prompts, case.num_prompt_tokens, case.num_output_tokens) == (3, 15, 21)


def test_prompts_are_the_same_in_every_run_and_begin_differently() -> None:
    """Runs are compared, and a prefix cache must not make one of them shorter."""
    case = Case.parse("8:12:1")
    prompts = case.prompts(1000)
    assert prompts == case.prompts(1000)
    assert [len(prompt) for prompt in prompts] == [12] * 8
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 8


def test_the_mix_is_the_one_that_figures_were_published_for() -> None:
    """256 prompts of 100 to 1024 tokens, 140,797 output tokens: another draw would be another benchmark."""
    case = Case.parse("mix")
    lengths = case.prompt_lengths + case.output_lengths
    assert (case.num_prompts, case.num_output_tokens) == (256, 140_797)
    assert (min(lengths), max(lengths)) == (100, 1024)


@pytest.mark.parametrize("text", ["", "8", "8:512", "8:512:1:1", "0:1:1", "1:-1:1", "a:b:c", "decode"])
def test_a_case_that_is_none_is_refused_by_name(text: str) -> None:
    """A typing error must not become another, quieter measurement."""
    with pytest.raises(ValueError, match="PROMPTS:IN:OUT") as caught:
        Case.parse(text)
    assert repr(text) in str(caught.value)
