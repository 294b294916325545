"""The shapes of what a call takes: prompts, parameters, multimodal data. Checked before anything runs."""

from operator import countOf
from typing import Any, cast

type Prompt = str | list[int]
type Prompts = str | list[int] | list[str] | list[list[int]]
"""One prompt, or a batch of one kind."""

FORMS = "str, list[int], list[str] or list[list[int]]"


def check_prompts(prompts: object) -> tuple[list[Prompt], bool]:
    """Gives the prompts as a list, and whether one came on its own.

    Raises: TypeError naming what came, and where.
    """
    if isinstance(prompts, str):
        return [prompts], True
    items = items_of(prompts)
    if items is None:
        raise TypeError(f"prompts is a {type(prompts).__name__}; give {FORMS}")
    if items and _is_token(items[0]):
        return [_tokens(items, "prompts")], True
    return [_prompt(item, index, items[0]) for index, item in enumerate(items)], False


def one_prompt(prompt: object) -> Prompt:
    """Gives a prompt that has to be a single one.

    Raises: TypeError when a batch came, and as `check_prompts`.
    """
    checked, is_single = check_prompts(prompt)
    if not is_single:
        raise TypeError(f"prompt is a list of {len(checked)} prompts; stream one at a time, str or list[int]")
    return checked[0]


def params_per_prompt(sampling_params: object, num_prompts: int) -> list[Any]:
    """Gives one SamplingParams a prompt, the caller's objects.

    Raises: TypeError and ValueError naming what came.
    """
    items = items_of(sampling_params)
    if items is None:
        items = [sampling_params] * num_prompts
    elif len(items) != num_prompts:
        raise ValueError(f"{len(items)} sampling_params came for {num_prompts} prompts; give one for each")
    for item in items:
        if not hasattr(item, "temperature"):
            raise TypeError(
                f"sampling_params is a {type(item).__name__}; give SamplingParams or a list of them"
            )
    return items


def check_multi_modal(multi_modal_data: object, num_prompts: int, *, is_single: bool) -> None:
    """Checks the shape of `multi_modal_data` against the prompts.

    Raises: TypeError and ValueError for a wrong shape; NotImplementedError for audio; ValueError
    for images and videos, since no model with a vision part is supported.
    """
    if multi_modal_data is None:
        return
    what = f"multi_modal_data is a {type(multi_modal_data).__name__}"
    if is_single:
        if not isinstance(multi_modal_data, dict):
            raise TypeError(f"{what}; one prompt takes a dict or None")
        items: list[object] = [multi_modal_data]
    else:
        found = items_of(multi_modal_data)
        if found is None:
            raise TypeError(f"{what}; a batch takes a list of dict or None")
        if len(found) != num_prompts:
            raise ValueError(
                f"multi_modal_data has {len(found)} entries for {num_prompts} prompts; give one for each"
            )
        items = found
    for index, item in enumerate(items):
        if isinstance(item, dict):
            _check_modalities(
                {str(key) for key in cast("dict[object, object]", item)}
            )  # cast: isinstance says no more
        elif item is not None:
            raise TypeError(f"multi_modal_data[{index}] is a {type(item).__name__}; give a dict or None")


def _check_modalities(names: set[str]) -> None:
    if "audio" in names:
        raise NotImplementedError(
            "multi_modal_data has 'audio'; no audio preprocessing or model is supported"
        )
    if {"image", "video"} <= names:
        raise NotImplementedError(
            "multi_modal_data has 'image' and 'video'; one request takes one of the two"
        )
    for modality in ("image", "video"):
        if modality in names:
            raise ValueError(
                f"multi_modal_data has {modality!r} and the model has no vision part;"
                " leave it out or load a model with one"
            )
    if names:
        raise ValueError(f"multi_modal_data has {', '.join(sorted(names))}; known are image, video and audio")


def items_of(value: object) -> list[object] | None:
    """Gives a list's items; None for what is no list, a tuple included."""
    return cast("list[object]", value) if isinstance(value, list) else None  # cast: isinstance says no more


def _prompt(item: object, index: int, first: object) -> Prompt:
    """Gives one prompt of a batch, of the same kind as the first."""
    if isinstance(item, str) and isinstance(first, str):
        return item
    tokens = items_of(item)
    if tokens is None or not isinstance(first, list):
        raise TypeError(f"prompts[{index}] is a {type(item).__name__}; give {FORMS}, one kind throughout")
    return _tokens(tokens, f"prompts[{index}]")


def _tokens(items: list[object], where: str) -> list[int]:
    if countOf(map(type, items), int) == len(items):  # told in a tenth of the time, and nearly always so
        return cast("list[int]", items)  # cast: each is one
    for index, item in enumerate(items):
        if not _is_token(item):
            raise TypeError(f"{where}[{index}] is a {type(item).__name__}, {item!r}; a token id is an int")
    return cast("list[int]", items)  # cast: each was checked


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
