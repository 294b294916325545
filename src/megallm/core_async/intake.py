"""Takes prompts in: checks all of them, makes token ids, and writes requests the engine can't refuse.

What is wrong with the call as a whole raises before anything runs. What is wrong with one prompt
is data: that prompt's result says so and its neighbours run. Touches no loop: callable from any
thread, and slow for long texts.
"""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct, structs

from megallm.core_async.config import EngineConfig
from megallm.core_async.errors import InvalidRequestError
from megallm.core_async.messages import NewRequest, RequestId, TextSpec, pack_ints
from megallm.core_async.plan.sampling import MAX_SEED, Resolved, resolve
from megallm.core_async.tokenizers import TokenizerAdapter

type Prompt = str | list[int]


class Entry(Struct):
    """One prompt of a call, and what becomes of it."""

    request_id: RequestId
    prompt: Prompt
    token_ids: list[int]
    params: Any
    """The caller's SamplingParams, as given."""
    request: NewRequest | None = None
    """What the engine runs; None when there is nothing to run."""
    error: InvalidRequestError | None = None
    """Why it can't run."""


class Call(Struct):
    """One `generate` or `stream` call, checked."""

    entries: list[Entry]
    is_single: bool
    """Whether one prompt came on its own rather than a list of them."""

    @property
    def requests(self) -> list[NewRequest]:
        """What the engine has to run."""
        return [entry.request for entry in self.entries if entry.request is not None]


class Intake:
    """Turns a user's call into requests for one engine."""

    def __init__(
        self, config: EngineConfig, tokenizer: TokenizerAdapter, next_id: Callable[[], RequestId]
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._next_id = next_id

    def prepare(
        self,
        prompts: object,
        sampling_params: object,
        multi_modal_data: object = None,
        *,
        is_streamed: bool = False,
        reports_progress: bool = False,
    ) -> Call:
        """Checks a whole call and tokenises its prompts.

        Raises: TypeError, ValueError, NotImplementedError for the call as a whole.
        """
        checked, is_single = check_prompts(prompts)
        all_params = _params_per_prompt(sampling_params, len(checked))
        check_multi_modal(multi_modal_data, len(checked), is_single=is_single)
        resolved_by_id: dict[int, Resolved] = {}
        entries: list[Entry] = []
        for prompt, params in zip(checked, all_params, strict=True):
            resolved = resolved_by_id.get(id(params))
            if resolved is None:
                resolved = resolve(params, eod=self._tokenizer.eod, vocab_size=self._config.vocab_size)
                self._check_bos(resolved)
                resolved_by_id[id(params)] = resolved
            entries.append(Entry(self._next_id(), prompt, [], params))
        for entry in entries:
            self._fill(entry, resolved_by_id[id(entry.params)], is_streamed, reports_progress)
        return Call(entries, is_single)

    def _fill(self, entry: Entry, resolved: Resolved, is_streamed: bool, reports_progress: bool) -> None:
        """Tokenises one prompt and writes its request, or why there is none."""
        entry.token_ids = self._token_ids(entry.prompt, resolved)
        max_new = self._max_new_tokens(entry, resolved)
        if entry.error is not None or not max_new:
            return
        sampling = resolved.sampling
        if not resolved.has_seed:
            sampling = structs.replace(sampling, seed=self._seed(entry.request_id))
        entry.request = NewRequest(
            request_id=entry.request_id,
            prompt=pack_ints(entry.token_ids),
            max_new_tokens=max_new,
            stop_token_ids=resolved.stop_token_ids,
            sampling=sampling,
            text=TextSpec(
                request_id=entry.request_id,
                stop_words=resolved.stop_words,
                keep_stop=resolved.keep_stop,
                is_streamed=is_streamed,
                reports_progress=reports_progress,
            ),
        )

    def _token_ids(self, prompt: Prompt, resolved: Resolved) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        ids = self._tokenizer.tokenize(prompt)
        if resolved.add_bos and self._tokenizer.bos is not None:
            ids = [self._tokenizer.bos, *ids]
        return ids

    def _check_bos(self, resolved: Resolved) -> None:
        if resolved.add_bos and self._tokenizer.bos is None:
            raise ValueError("add_BOS is True and the tokenizer has no bos token; leave add_BOS off")

    def _max_new_tokens(self, entry: Entry, resolved: Resolved) -> int:
        """Gives the output budget, clamped to the context; sets the entry's error where there can be none."""
        length, limit, vocab_size = (
            len(entry.token_ids),
            self._config.max_sequence_length,
            self._config.vocab_size,
        )
        if not length:
            entry.error = InvalidRequestError("prompt is empty, 0 tokens; give at least 1")
        elif length > limit:
            entry.error = InvalidRequestError(
                f"prompt has {length:,} tokens, max_sequence_length is {limit:,};"
                " shorten it or raise InferenceConfig.max_sequence_length"
            )
        elif min(entry.token_ids) < 0 or max(entry.token_ids) >= vocab_size:
            bad = next(token for token in entry.token_ids if not 0 <= token < vocab_size)
            entry.error = InvalidRequestError(
                f"prompt has token id {bad}; the vocabulary is 0 to {vocab_size - 1:,}"
            )
        elif resolved.num_total is not None and resolved.num_total < length:
            entry.error = InvalidRequestError(
                f"prompt has {length:,} tokens, num_tokens_total is {resolved.num_total:,}; raise it or shorten the prompt"
            )
        if resolved.num_total is not None:
            wanted = resolved.num_total - length
        else:
            wanted = limit if resolved.num_new is None else resolved.num_new
        return min(wanted, limit - length)

    def _seed(self, request_id: int) -> int:
        """Gives an unseeded request its seed: another for each, the same ones in each run of a script."""
        return (self._config.sampling_seed * 0x9E3779B97F4A7C15 + request_id * 0xBF58476D1CE4E5B9) & MAX_SEED


def check_prompts(prompts: object) -> tuple[list[Prompt], bool]:
    """Gives the prompts as a list, and whether one came on its own.

    Raises: TypeError naming what came, and where.
    """
    if isinstance(prompts, str):
        return [prompts], True
    if not isinstance(prompts, list):
        raise TypeError(
            f"prompts is a {type(prompts).__name__}; give str, list[int], list[str] or list[list[int]]"
        )
    if not prompts:
        return [], False
    first = prompts[0]
    if _is_token(first):
        _check_tokens(prompts, "prompts")
        return [prompts], True
    for index, prompt in enumerate(prompts):
        if isinstance(first, str) and isinstance(prompt, str):
            continue
        if isinstance(first, list) and isinstance(prompt, list):
            _check_tokens(prompt, f"prompts[{index}]")
            continue
        where = f"prompts[{index}] is a {type(prompt).__name__}"
        raise TypeError(f"{where}; give str, list[int], list[str] or list[list[int]], one kind throughout")
    return list(prompts), False


def one_prompt(prompt: object) -> object:
    """Gives a prompt that has to be a single one.

    Raises: TypeError when a batch came.
    """
    checked, is_single = check_prompts(prompt)
    if not is_single:
        raise TypeError(f"prompt is a list of {len(checked)} prompts; stream one at a time, str or list[int]")
    return prompt


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_tokens(tokens: Sequence[object], where: str) -> None:
    for index, token in enumerate(tokens):
        if not _is_token(token):
            raise TypeError(f"{where}[{index}] is a {type(token).__name__}, {token!r}; a token id is an int")


def _params_per_prompt(sampling_params: object, num_prompts: int) -> list[Any]:
    if isinstance(sampling_params, list):
        if len(sampling_params) != num_prompts:
            raise ValueError(
                f"{len(sampling_params)} sampling_params came for {num_prompts} prompts; give one of each"
            )
        return sampling_params
    if not hasattr(sampling_params, "temperature"):
        raise TypeError(
            f"sampling_params is a {type(sampling_params).__name__}; give SamplingParams or a list of them"
        )
    return [sampling_params] * num_prompts


def check_multi_modal(multi_modal_data: object, num_prompts: int, *, is_single: bool) -> None:
    """Checks the shape of `multi_modal_data` against the prompts.

    Raises: TypeError and ValueError for a wrong shape; NotImplementedError for audio; ValueError
    for images and videos, since no model with a vision part is supported.
    """
    if multi_modal_data is None:
        return
    if is_single:
        if not isinstance(multi_modal_data, dict):
            raise TypeError(
                f"multi_modal_data is a {type(multi_modal_data).__name__}; one prompt takes a dict or None"
            )
        items: list[object] = [multi_modal_data]
    else:
        if not isinstance(multi_modal_data, list):
            raise TypeError(
                f"multi_modal_data is a {type(multi_modal_data).__name__}; a batch takes a list of dict or None"
            )
        if len(multi_modal_data) != num_prompts:
            raise ValueError(
                f"multi_modal_data has {len(multi_modal_data)} entries for {num_prompts} prompts; give one of each"
            )
        items = multi_modal_data
    for index, item in enumerate(items):
        if item is None:
            continue
        if not isinstance(item, dict):
            raise TypeError(f"multi_modal_data[{index}] is a {type(item).__name__}; give a dict or None")
        _check_modalities(item)


def _check_modalities(item: dict[object, object]) -> None:
    if "audio" in item:
        raise NotImplementedError(
            "multi_modal_data has 'audio'; no audio preprocessing or model is supported"
        )
    if "image" in item and "video" in item:
        raise NotImplementedError(
            "multi_modal_data has 'image' and 'video'; one request takes one of the two"
        )
    for modality in ("image", "video"):
        if modality in item:
            raise ValueError(
                f"multi_modal_data has {modality!r} and the model has no vision part; leave it out or load a model with one"
            )
    unknown = sorted(map(str, item))
    if unknown:
        raise ValueError(f"multi_modal_data has {', '.join(unknown)}; known are image, video and audio")
