"""Markers in text that comes in parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.http.parsers.markers import Found, JsonEnd, MarkerFinder, TextEnd
from tests.http.parsers.splitting import splits, texts

END = "</t>"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain", Found("plain", None, 5)),
        ("a<thi", Found("a", None, 1)),
        ("a<thx", Found("a<thx", None, 5)),
        ("a<<", Found("a<", None, 2)),
        ("a<th<", Found("a<th", None, 4)),
        ("a<think>b</think>", Found("a", "<think>", 8)),
        ("a</think>b<think>", Found("a", "</think>", 9)),
        ("a</thi", Found("a", None, 1)),
        ("", Found("", None, 0)),
    ],
)
def test_only_text_that_could_begin_a_marker_waits(text: str, found: Found) -> None:
    """A marker that a reader sees half of can't be taken back; any other text should not be late."""
    assert MarkerFinder(("<think>", "</think>")).find(text) == found


def test_a_search_goes_on_where_the_last_one_ended() -> None:
    """What comes before is given already, even where it would be the start of a marker with what follows."""
    assert MarkerFinder(("<a>",)).find("<a><a", 3) == Found("", None, 3)
    assert MarkerFinder(("<a>",)).find("<<a>", 2) == Found("a>", None, 4)


def grow(end: TextEnd, parts: list[str]) -> int | None:
    """Gives where the marker ends that `end` finds in a text that grows by these parts."""
    num_before = 0
    for part in parts:
        if (place := end.find(part)) is not None:
            return num_before + place
        num_before += len(part)
    return None


@given(st.data())
def test_an_end_is_found_however_the_text_comes(data: st.DataObject) -> None:
    """Where a call ends must not depend on how the tokens were cut into deltas."""
    text = data.draw(texts(END, '"', "\\", '\\"', "<"))
    parts = data.draw(splits(text))
    start = text.find(END)
    assert grow(TextEnd(END), parts) == (None if start < 0 else start + len(END))
    assert grow(JsonEnd(END), parts) == JsonEnd(END).find(text)
    behind = TextEnd(END).find("</t" + text, 3)
    assert behind == (None if start < 0 else start + len(END) + 3)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ('{"a": "</t>"}</t>', 13),
        ('"\\"</t>"</t>', 8),
        ('"\\\\"</t>', 4),
        ('"\\</t>"</t>', 7),
        ('"</t>', None),
        ("</t></t>", 0),
    ],
)
def test_in_json_an_end_inside_a_string_is_none(text: str, start: int | None) -> None:
    """A tool may be asked to write a file that is about tool calls."""
    assert JsonEnd(END).find(text) == (None if start is None else start + len(END))
