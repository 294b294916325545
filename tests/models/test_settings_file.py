"""Settings read by key and type, each fault with file and key."""

from pathlib import Path

import pytest

from megallm.core_async.errors import ModelFileError
from megallm.models.settings_file import Settings

SETTINGS = Settings(
    Path("a.json"),
    {"one": 1, "half": 0.5, "none": None, "inner": {"text": "x"}, "list": [1, 2.5], "odd": ["a"]},
)


def test_values_come_by_key_and_type_and_null_is_absent() -> None:
    """Hugging Face writes null for what is not set."""
    assert SETTINGS.value("one", int) == 1
    assert SETTINGS.value("one", float) == 1.0
    assert type(SETTINGS.value("one", float)) is float
    assert SETTINGS.value_or("none", 7) == SETTINGS.value_or("absent", 7) == 7
    assert not SETTINGS.has("none")
    assert SETTINGS.numbers("list") == [1, 2.5]


def test_an_object_inside_keeps_its_place_in_messages() -> None:
    """A key alone is found three times in some files."""
    assert SETTINGS.inside("inner").value("text", str) == "x"
    with pytest.raises(ModelFileError, match=r"a\.json: inner\.size is missing"):
        SETTINGS.inside("inner").value("size", int)
    assert SETTINGS.inside("absent").values == {}


def test_defaults_stand_in_for_absent_keys_and_not_for_null() -> None:
    """Null often means that a part is turned off, whose default is that it is on."""
    filled = SETTINGS.inside("inner").over({"text": "y", "size": 3})
    assert filled.values == {"text": "x", "size": 3}
    assert not SETTINGS.over({"none": 5}).has("none")
    assert filled.name_of("size") == "a.json: inner.size"


@pytest.mark.parametrize(
    ("key", "kind", "said"),
    [
        ("half", int, "half is float 0.5, int is needed"),
        ("none", int, "none is missing"),
        ("one", str, "one is int"),
    ],
)
def test_another_type_is_refused(key: str, kind: type, said: str) -> None:
    """A number in quotes would be compared and never be larger."""
    with pytest.raises(ModelFileError, match=rf"a\.json: {said}"):
        SETTINGS.value(key, kind)


def test_a_list_of_something_else_is_refused() -> None:
    """One text among numbers."""
    with pytest.raises(ModelFileError, match=r"a\.json: odd is no list of numbers"):
        SETTINGS.numbers("odd")


def test_a_file_that_is_absent_or_no_object_is_refused_with_its_path(tmp_path: Path) -> None:
    """An empty file is what a broken download leaves."""
    with pytest.raises(ModelFileError, match=r"a\.json can't be read"):
        Settings.read(tmp_path / "a.json")
    for content in (b"", b"[]", b"\xff"):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(ModelFileError, match=r"a\.json holds no JSON object"):
            Settings.read(tmp_path / "a.json")
