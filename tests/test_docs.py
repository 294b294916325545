"""The pages of docs/ tell the truth: their Python runs, their links lead somewhere, their commands parse."""

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megallm.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
SNIPPETS = [
    pytest.param(page, snippet, id=f"{page.stem} {number}")
    for page in PAGES
    for number, snippet in enumerate(
        re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    )
]


@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_a_snippet_runs_as_it_stands_and_prints_something(
    page: Path,
    snippet: str,
    demo_model: tuple[Any, Any],  # Any: as the fixture's
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a reader copies must work; `demo_model` is there so that the file is in the cache."""
    assert len(demo_model) == 2
    exec(compile(snippet, page.name, "exec"), {"__name__": "__main__"})  # noqa: S102 - our own text, under test
    assert len(capsys.readouterr().out.split()) > 3


def test_each_kind_of_user_has_a_page_with_something_to_copy() -> None:
    """An extraction that finds nothing would make the test above pass for the wrong reason."""
    pages = {page.stem for page in PAGES}
    assert {"scripts", "frameworks", "server", "benchmarks", "architecture", "tuning", "migration"} <= pages
    assert len(SNIPPETS) > 8


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_every_link_leads_to_a_file(page: Path) -> None:
    """Links break silently when files move."""
    linked = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [name for name in linked if not (page.parent / name).exists()] == []


def test_every_page_is_linked_from_the_index() -> None:
    """A page that nothing leads to is not read."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if page.stem != "index" and f"({page.name})" not in index] == []


def test_every_command_that_a_page_names_exists() -> None:
    """A command that fails as written costs the reader's trust in the rest."""
    named: set[str] = set()
    for page in PAGES:
        for block in re.findall(
            r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                named |= {after for word, after in itertools.pairwise(words) if word == "megallm"}
    assert named
    assert named <= set(COMMANDS)
