"""The shapes of what a call takes: every form of prompts, and a clear word about every other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megallm.core_async.plan.prompts import check_multi_modal, check_prompts, one_prompt, params_per_prompt
from megallm.core_async.sampling_params import SamplingParams

FORMS = r"give str, list\[int\], list\[str\] or list\[list\[int\]\]"
GREEDY = SamplingParams(temperature=0.0)
NOTHING: list[int] = []


@pytest.mark.parametrize(
    ("prompts", "checked", "is_single"),
    [
        ("AB", ["AB"], True),
        ([33, 34], [[33, 34]], True),
        (["AB"], ["AB"], False),
        (["AB", "C"], ["AB", "C"], False),
        ([[33, 34]], [[33, 34]], False),
        ([[33], [34, 35]], [[33], [34, 35]], False),
        (NOTHING, NOTHING, False),
        ("", [""], True),
        ([NOTHING], [NOTHING], False),
    ],
)
def test_each_form_of_prompts(prompts: object, checked: list[object], is_single: bool) -> None:  # noqa: FBT001 - pytest passes it by name
    """One prompt is a `str` or its ids; a list of either is a batch, one of none too."""
    assert check_prompts(prompts) == (checked, is_single)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (("a", "b"), rf"prompts is a tuple; {FORMS}"),
        ({"a"}, rf"prompts is a set; {FORMS}"),
        ({"a": 1}, rf"prompts is a dict; {FORMS}"),
        (b"a", rf"prompts is a bytes; {FORMS}"),
        (5, rf"prompts is a int; {FORMS}"),
        (None, rf"prompts is a NoneType; {FORMS}"),
        ([None], rf"prompts\[0\] is a NoneType; {FORMS}"),
        ([1.5], rf"prompts\[0\] is a float; {FORMS}"),
        ([True], rf"prompts\[0\] is a bool; {FORMS}"),
        ([(1, 2)], rf"prompts\[0\] is a tuple; {FORMS}"),
        (["a", 5], rf"prompts\[1\] is a int; {FORMS}, one kind throughout"),
        (["a", [5]], rf"prompts\[1\] is a list; {FORMS}, one kind throughout"),
        ([[5], "a"], rf"prompts\[1\] is a str; {FORMS}, one kind throughout"),
        ([[5], [6], None], rf"prompts\[2\] is a NoneType; {FORMS}"),
        ([1, 2, "a"], r"prompts\[2\] is a str, 'a'; a token id is an int"),
        ([1, True], r"prompts\[1\] is a bool, True; a token id is an int"),
        ([[1], [2, 3.0]], r"prompts\[1\]\[1\] is a float, 3.0; a token id is an int"),
        ([[1], [False]], r"prompts\[1\]\[0\] is a bool, False; a token id is an int"),
        ([[[1]]], r"prompts\[0\]\[0\] is a list, \[1\]; a token id is an int"),
    ],
)
def test_anything_else_is_a_type_error_that_says_what_came_and_where(prompts: object, message: str) -> None:
    """Upstream looks at the first element alone, and fails in the engine's step on the others."""
    with pytest.raises(TypeError, match=message):
        check_prompts(prompts)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 200) | st.text(max_size=3) | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(max_size=1), inner)
        ),
        max_leaves=6,
    )
)
def test_any_object_is_taken_or_refused_as_a_type_error(prompts: object) -> None:
    """Whatever JSON or a notebook holds: no other exception, and only prompts come out."""
    try:
        checked, is_single = check_prompts(prompts)
    except TypeError as error:
        checked, is_single = [], False
        assert str(error).startswith("prompts")  # noqa: PT017 - most objects are taken
    assert all(isinstance(prompt, str) or all(type(token) is int for token in prompt) for prompt in checked)
    assert not is_single or len(checked) == 1


def test_a_stream_takes_one_prompt_alone() -> None:
    """A stream of several would have to say whose each delta is."""
    assert one_prompt("A") == "A"
    assert one_prompt([1, 2]) == [1, 2]
    with pytest.raises(TypeError, match=r"prompt is a list of 2 prompts; stream one at a time"):
        one_prompt(["A", "B"])
    with pytest.raises(TypeError, match=r"prompt is a list of 1 prompts"):
        one_prompt(["A"])
    with pytest.raises(TypeError, match="prompts is a tuple"):
        one_prompt(("A",))


# ---- parameters --------------------------------------------------------------------------------


def test_one_set_of_parameters_serves_all_and_a_list_one_each() -> None:
    """The caller's objects themselves: results give them back."""
    other = SamplingParams(top_k=5)
    assert params_per_prompt(GREEDY, 2) == [GREEDY, GREEDY]
    each = params_per_prompt([GREEDY, other], 2)
    assert each[0] is GREEDY
    assert each[1] is other
    assert params_per_prompt([], 0) == []


@pytest.mark.parametrize(("num_params", "num_prompts"), [(1, 2), (3, 2), (0, 1), (1, 0)])
def test_as_many_parameters_as_prompts(num_params: int, num_prompts: int) -> None:
    """Which belongs to which would be a guess."""
    message = f"^{num_params} sampling_params came for {num_prompts} prompts; give one for each"
    with pytest.raises(ValueError, match=message):
        params_per_prompt([GREEDY] * num_params, num_prompts)


@pytest.mark.parametrize("wrong", [5, "greedy", {"temperature": 0.0}, (GREEDY,), None])
def test_parameters_of_another_kind_are_a_type_error(wrong: object) -> None:
    """A dict of options is an easy mistake; taken for an object it would mean all the defaults."""
    message = rf"sampling_params is a {type(wrong).__name__}; give SamplingParams"
    with pytest.raises(TypeError, match=message):
        params_per_prompt(wrong, 1)
    with pytest.raises(TypeError, match=message):
        params_per_prompt([GREEDY, wrong], 2)


# ---- images and videos -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "is_single", "error", "message"),
    [
        ([None], True, TypeError, "multi_modal_data is a list; one prompt takes a dict or None"),
        ({}, False, TypeError, "multi_modal_data is a dict; a batch takes a list of dict or None"),
        ([None], False, ValueError, "multi_modal_data has 1 entries for 2 prompts; give one for each"),
        ([None, b"x"], False, TypeError, r"multi_modal_data\[1\] is a bytes; give a dict or None"),
        ({"audio": b""}, True, NotImplementedError, "'audio'"),
        ({"image": b"", "video": b""}, True, NotImplementedError, "one request takes one of the two"),
        ({"image": b""}, True, ValueError, "'image' and the model has no vision part"),
        ([None, {"video": b""}], False, ValueError, "'video' and the model has no vision part"),
        ({"smell": 1}, True, ValueError, "multi_modal_data has smell; known are image, video and audio"),
    ],
)
def test_multimodal_input_of_the_wrong_shape_or_kind(
    given: object,
    is_single: bool,  # noqa: FBT001 - pytest passes it by name
    error: type[Exception],
    message: str,
) -> None:
    """Each is refused at the call: text alone, generated as if the image were not there, would be a lie."""
    with pytest.raises(error, match=message):
        check_multi_modal(given, 1 if is_single else 2, is_single=is_single)


def test_no_multimodal_input_in_any_shape_is_fine() -> None:
    """Code that handles both kinds of prompts passes None or empty dicts for text."""
    check_multi_modal(None, 2, is_single=False)
    empty: dict[str, object] = {}
    check_multi_modal(empty, 1, is_single=True)
    check_multi_modal([None, empty], 2, is_single=False)
