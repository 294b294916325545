"""The progress bar: on stderr, for those who want one."""

import io
import sys
import threading

import pytest

from megallm.sync.progress import wants_bar
from tests.small_llm import expected, greedy, settings, sync_llm, tokens_of


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        """Says that it is."""
        return True


def test_a_bar_is_shown_for_several_prompts_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a log file it would be a page of noise, and for one prompt it says nothing."""
    assert not wants_bar(5, progress=None), "pytest's stderr is none"
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert wants_bar(5, progress=None)
    assert not wants_bar(1, progress=None)
    assert not wants_bar(0, progress=None)


@pytest.mark.parametrize("progress", [True, False])
def test_the_caller_has_the_last_word(monkeypatch: pytest.MonkeyPatch, progress: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """On a terminal and off it, for one prompt and for many."""
    assert wants_bar(1, progress=progress) is progress
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert wants_bar(5, progress=progress) is progress


def test_a_bar_counts_prompts_and_says_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts done, prompt and output tokens a second; and the answers are the same."""
    with sync_llm() as llm:
        prompts = [[index] * 9 for index in range(5)]
        results = llm.generate(prompts, greedy(7), progress=True)
        seen = capsys.readouterr()
        assert tokens_of(results) == [expected(prompt, 7) for prompt in prompts]
        assert seen.out == "", "stdout belongs to the user"
        assert "5/5" in seen.err
        assert "prompt" in seen.err
        assert "tok/s, output" in seen.err


def test_a_bar_counts_prompts_that_do_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    """It would otherwise never reach its end."""
    with sync_llm() as llm:
        llm.generate([[1], [], [2] * 128, [500]], greedy(3), progress=True)
        assert "4/4" in capsys.readouterr().err
        llm.generate([[]], greedy(3), progress=True)
        assert "1/1" in capsys.readouterr().err


def test_the_rates_are_of_all_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt tokens count when their prompt is done, output tokens as they come."""
    with sync_llm() as llm:
        llm.generate([[5] * 100, [6] * 100], greedy(20), progress=True)
        last = capsys.readouterr().err.replace("\r", "\n").rstrip().splitlines()[-1]
        prompt_rate, output_rate = (
            float(part.split()[-1].replace(",", "")) for part in last.split(" tok/s")[:2]
        )
        assert prompt_rate / output_rate == pytest.approx(200 / 40, rel=0.1)


def test_no_bar_is_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Libraries call `generate` too."""
    with sync_llm() as llm:
        llm.generate(["A", "B"], greedy(3))
        llm.generate(["A", "B"], greedy(3), progress=False)
        seen = capsys.readouterr()
        assert (seen.out, seen.err) == ("", "")


def test_a_bar_starts_no_thread_and_is_closed_on_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Tqdm's monitor would be a thread that nobody asked for; an open bar scrambles the next line."""
    before = threading.active_count()
    with sync_llm(config=settings(num_blocks=64)) as llm:
        during = threading.active_count()
        llm.generate(["A", "B"], greedy(3), progress=True)
        assert threading.active_count() == during
        llm.shutdown()
        with pytest.raises(RuntimeError, match="shut down"):
            llm.generate(["A", "B"], greedy(3), progress=True)
        assert capsys.readouterr().err.endswith("\n")
    assert threading.active_count() == before
