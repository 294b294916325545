"""The body of a completions request."""

import msgspec
import pytest

from megallm.http.bodies.schema_completions import CompletionRequest


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]], []])
def test_a_prompt_has_four_kinds(prompt: object) -> None:
    """What a mixture means is checked later."""
    assert msgspec.convert({"prompt": prompt}, CompletionRequest).prompt == prompt


@pytest.mark.parametrize("prompt", [5, None, {"a": 1}, [1.5], [["a"]], [True], [[[1]]]])
def test_another_is_none(prompt: object) -> None:
    """With the path of the fault."""
    with pytest.raises(msgspec.ValidationError, match=r"\$\.prompt"):
        msgspec.convert({"prompt": prompt}, CompletionRequest)
    with pytest.raises(msgspec.ValidationError, match="prompt"):
        msgspec.convert({}, CompletionRequest)
