"""The README tells the truth: its Python runs, and the files and commands it names are there."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)


def test_there_are_snippets_for_both_interfaces() -> None:
    """An extraction that finds nothing would make the next test pass for the wrong reason."""
    assert [
        name for name in ("MegatronLLM(", "MegatronAsyncLLM(") if not any(name in text for text in SNIPPETS)
    ] == []


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[f"snippet {number}" for number in range(len(SNIPPETS))])
def test_a_snippet_runs_as_it_stands_and_prints_an_answer(
    snippet: str,
    demo_model: tuple[Any, Any],  # Any: as the fixture's
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first thing a newcomer copies must work; `demo_model` is there so that the file is in the cache."""
    assert len(demo_model) == 2
    exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})  # noqa: S102 - our own text, under test
    assert len(capsys.readouterr().out.split()) > 5


def test_the_first_screen_has_exactly_the_two_set_up_commands() -> None:
    """A newcomer reads one screen; everything before the first answer must be on it."""
    first_block = README.split("```")[1]
    assert re.findall(r"^make \w+", first_block, flags=re.MULTILINE) == ["make demo", "make test"]
    assert README[: README.index(first_block)].count("\n") < 25


def test_every_make_target_it_names_exists() -> None:
    """A command that fails as written costs the reader's trust in the rest."""
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(set(COMMANDS) - set(targets)) == []


def test_every_file_it_links_to_exists() -> None:
    """Links break silently when files move."""
    linked = re.findall(r"\]\((?!https?://)([^)#]+)", README)
    assert [name for name in linked if not (ROOT / name).exists()] == []


def test_every_folder_and_file_of_the_table_exists() -> None:
    """The table is the newcomer's map of the code."""
    rows = re.findall(r"^\| [\d-]+ \| ([^|]+) \|", README, flags=re.MULTILINE)
    assert len(rows) > 5
    missing: list[str] = []
    for row in rows:
        names = re.findall(r"`([\w./]+)`", row)
        base = ROOT / "src" / "megallm"
        if len(names) > 1 and names[0] == "core_async/":
            base, names = base / "core_async", names[1:]
        missing += [
            name for name in names if not (base / name).exists() and not (base / f"{name}.py").exists()
        ]
    assert missing == []
