"""Takes prompts in: checks all of them, makes token ids, and writes requests the engine can't refuse.

What is wrong with the call as a whole raises before anything runs. What is wrong with one prompt
is data: that prompt's result says so and its neighbours run. Touches no loop: callable from any
thread, and slow for long texts.
"""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct, structs

from megallm.core_async.config import EngineConfig
from megallm.core_async.errors import InvalidRequestError
from megallm.core_async.matchers import Matchers
from megallm.core_async.messages import Ints, NewRequest, RequestId, TextSpec, pack_ints
from megallm.core_async.plan.prompts import Prompt, check_multi_modal, check_prompts, params_per_prompt
from megallm.core_async.plan.sampling import MAX_SEED, Resolved, resolve
from megallm.core_async.tokenizers import TokenizerAdapter


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
        self,
        config: EngineConfig,
        tokenizer: TokenizerAdapter,
        next_id: Callable[[], RequestId],
        matchers: Matchers | None = None,
    ) -> None:
        """`matchers`: shared with the runner, so that a grammar is compiled once."""
        self._config = config
        self._tokenizer = tokenizer
        self.matchers = matchers or Matchers(tokenizer, config.vocab_size)
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
        all_params = params_per_prompt(sampling_params, len(checked))
        check_multi_modal(multi_modal_data, len(checked), is_single=is_single)
        resolved_by_id: dict[int, Resolved] = {}
        entries: list[Entry] = []
        for prompt, params in zip(checked, all_params, strict=True):
            resolved = resolved_by_id.get(id(params))
            if resolved is None:
                resolved = resolve(
                    params, end_ids=self._tokenizer.end_ids, vocab_size=self._config.vocab_size
                )
                self._check_bos(resolved)
                if resolved.sampling.grammar:
                    self.matchers.check(resolved.sampling.grammar)
                resolved_by_id[id(params)] = resolved
            entries.append(Entry(self._next_id(), prompt, [], params))
        for entry in entries:
            self._fill(
                entry,
                resolved_by_id[id(entry.params)],
                is_streamed=is_streamed,
                reports_progress=reports_progress,
            )
        return Call(entries, is_single)

    def _fill(self, entry: Entry, resolved: Resolved, *, is_streamed: bool, reports_progress: bool) -> None:
        """Tokenises one prompt and writes its request, or why there is none."""
        try:
            entry.token_ids = self._token_ids(entry.prompt, resolved)
        except InvalidRequestError as error:
            entry.error = error
            return
        column = self._checked(entry, resolved)
        if column is None:
            return
        max_new = self._max_new_tokens(len(entry.token_ids), resolved)
        has_scores = resolved.scores_prompt and len(entry.token_ids) > 1  # the first token has none
        if not (max_new or has_scores):
            return
        sampling = resolved.sampling
        if not resolved.has_seed:
            sampling = structs.replace(sampling, seed=self._seed(entry.request_id))
        entry.request = NewRequest(
            request_id=entry.request_id,
            prompt=column,
            max_new_tokens=max_new,
            stop_token_ids=resolved.stop_token_ids,
            sampling=sampling,
            text=TextSpec(
                request_id=entry.request_id,
                stop_words=resolved.stop_words,
                keep_stop=resolved.keep_stop,
                is_streamed=is_streamed,
                reports_progress=reports_progress,
                wants_log_probs=sampling.wants_log_probs,
                num_top=sampling.num_top,
                tracks_tokens=self._config.tracks_tokens,
            ),
            min_new_tokens=min(resolved.min_new, max_new),
            scores_prompt=has_scores,
            priority=resolved.priority,
            salt=resolved.salt,
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

    def _checked(self, entry: Entry, resolved: Resolved) -> Ints | None:
        """Gives a prompt's column; None, and the entry's error, where it can't run."""
        length, limit, vocab_size = (
            len(entry.token_ids),
            self._config.max_sequence_length,
            self._config.vocab_size,
        )
        column: Ints | None = None
        if not length:
            entry.error = InvalidRequestError("prompt is empty, 0 tokens; give at least 1")
        elif length > limit:
            entry.error = InvalidRequestError(
                f"prompt has {length:,} tokens, max_sequence_length is {limit:,};"
                " shorten it or raise InferenceConfig.max_sequence_length"
            )
        elif (column := _column_of(entry.token_ids, vocab_size)) is None:
            bad = next(token for token in entry.token_ids if not 0 <= token < vocab_size)
            entry.error = InvalidRequestError(
                f"prompt has token id {bad}; the vocabulary is 0 to {vocab_size - 1:,}"
            )
        elif resolved.num_total is not None and resolved.num_total < length:
            entry.error = InvalidRequestError(
                f"prompt has {length:,} tokens, num_tokens_total is {resolved.num_total:,};"
                " raise it or shorten the prompt"
            )
        return column if entry.error is None else None

    def _max_new_tokens(self, length: int, resolved: Resolved) -> int:
        """Gives the output budget of a prompt of `length` tokens, clamped to the context."""
        limit = self._config.max_sequence_length
        if resolved.num_total is not None:
            wanted = resolved.num_total - length
        else:
            wanted = limit if resolved.num_new is None else resolved.num_new
        return min(wanted, limit - length)

    def _seed(self, request_id: int) -> int:
        """Gives an unseeded request its seed: another for each, the same ones in each run of a script."""
        return (self._config.sampling_seed * 0x9E3779B97F4A7C15 + request_id * 0xBF58476D1CE4E5B9) & MAX_SEED


def _column_of(token_ids: list[int], vocab_size: int) -> Ints | None:
    """Gives ids as a column; None where one of them is outside the vocabulary."""
    try:
        column = Ints(struct.pack(f"{len(token_ids)}i", *token_ids))  # in 0.6 of the time of `pack_ints`
    except struct.error:
        try:
            column = pack_ints(token_ids)  # tells what is no int, of a tokenizer's, from what is too large
        except OverflowError:
            return None
    largest = np.frombuffer(column, dtype=np.uint32).max()  # of which the negative ones are the largest
    return column if largest < vocab_size else None
