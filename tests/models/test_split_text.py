"""Special tokens found in text."""

from megallm.models.split_text import SpecialSplitter


def test_text_is_cut_at_special_tokens_the_longest_first() -> None:
    """`<end>` inside `<end>>` must not hide the longer one, nor a dot mean any character."""
    splitter = SpecialSplitter({"<end>": 1, "<end>>": 2, ".": 3})
    assert list(splitter.parts("a<end>>b<end>c.")) == ["a", 2, "b", 1, "c", 3]
    assert list(splitter.parts("<end><end>")) == [1, 1]


def test_without_special_tokens_the_text_is_one_part() -> None:
    """An empty pattern matches everywhere."""
    assert list(SpecialSplitter({}).parts("ab")) == ["ab"]
    assert list(SpecialSplitter({}).parts("")) == []
