"""The page at `/`, read as a file; tests/http/test_page_browser.py uses it."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

PAGE = (files("megallm.http") / "page.html").read_text(encoding="utf-8")


class _Elements(HTMLParser):
    """Collects every element with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See HTMLParser."""
        self.found.append((tag, dict(attrs)))


def elements(*tags: str) -> list[dict[str, str | None]]:
    """Gives the attributes of all elements of these kinds, or of any."""
    parser = _Elements()
    parser.feed(PAGE)
    return [attributes for tag, attributes in parser.found if not tags or tag in tags]


def policy() -> dict[str, str]:
    """Gives the page's content security policy by directive."""
    (content,) = (
        each["content"] for each in elements("meta") if each.get("http-equiv") == "Content-Security-Policy"
    )
    assert content is not None
    return dict(directive.strip().split(" ", 1) for directive in content.split(";"))


def test_nothing_comes_from_anywhere_else() -> None:
    """The page must work on a machine without the internet, and tell nobody that it is used."""
    linked = [
        attributes.get(name) for attributes in elements() for name in ("src", "href", "action", "srcset")
    ]
    assert {link for link in linked if link} == {"data:,"}  # no icon, rather than one that is asked for
    assert not re.findall(r"https?:|@import|url\(|//\w+\.", PAGE)
    assert set(re.findall(r'fetch\("([^"]+)"', PAGE)) == {"v1/models", "v1/chat/completions", "metrics"}


def test_the_browser_enforces_that_nothing_else_runs() -> None:
    """Text of a model that became a script by some mistake would be refused."""
    directives = policy()
    assert directives["default-src"] == "'none'"
    assert directives["connect-src"] == "'self'"
    assert "unsafe" not in str(directives)


@pytest.mark.parametrize("tag", ["style", "script"])
def test_the_policy_allows_the_page_its_own_code(tag: str) -> None:
    """A browser ignores code without this hash: whoever edits it puts the new one in the policy."""
    (code,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert policy()[f"{tag}-src"] == f"'sha256-{digest}'"


@pytest.mark.parametrize(
    "construct", ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function"]
)
def test_text_never_becomes_code(construct: str) -> None:
    """What a model writes is not to be trusted."""
    assert construct not in PAGE


def test_code_stands_in_one_place() -> None:
    """Attributes with code would need a policy that allows any."""
    names = {name for attributes in elements() for name in attributes}
    assert not {name for name in names if name.startswith("on") or name == "style"}


def test_every_field_has_a_label() -> None:
    """A screen reader names a field by its label alone."""
    labelled = {attributes.get("for") for attributes in elements("label")}
    fields = {attributes.get("id") for attributes in elements("input", "textarea", "select")}
    assert fields == labelled
    assert fields >= {"message", "temperature", "top_p", "max_tokens", "system", "api_key"}


def test_what_changes_is_announced() -> None:
    """Who can't see the page hears the answer once it is whole, and errors at once."""
    roles = {attributes.get("id"): attributes for attributes in elements() if attributes.get("role")}
    assert roles["conversation"]["aria-live"] == "polite"
    assert roles["error"]["role"] == "alert"
    assert roles["status"]["role"] == "status"


def test_the_page_follows_the_systems_light_and_dark() -> None:
    """A white page at night hurts."""
    assert "prefers-color-scheme: dark" in PAGE
    assert "color-scheme: light dark" in PAGE
