"""Holds rows of the batch to their grammars: one matcher a row, one mask a step.

Knows rows, tokens and logits; what a grammar is, `matchers.py` knows. The rank's thread alone calls it.

The mask of a row's next token depends on the token before, so between two steps that sample a row its
token must have gone through `advance`. Where a step has run when its launch returns, as on a CPU, that
happens right after sampling. On a CUDA device with a step in flight the runner

1. launches the forward pass of step N + 1, whose inputs never leave the device;
2. waits for the copy of step N's tokens and calls `advance` with them, while the pass runs;
3. calls `mask` on the logits of step N + 1 and samples: the bits are made here meanwhile, 0.1 ms for 32
   rows, and copied without waiting from pinned memory, which is free again once that step's tokens are here.

Steps without a row that has a grammar (`holds`) need none of this.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megallm.core_async.device.rows import IntColumn
from megallm.core_async.matchers import Matchers, fault_of

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

type Bits = NDArray[np.uint32]
"""One bit a token, the lowest id in the lowest bit of the first word."""

_WORD_BITS = 32


class _HeldRow:
    """A row's grammar and how far its output has come."""

    def __init__(self, grammar: str, end_ids: tuple[int, ...], min_new: int) -> None:
        self.grammar = grammar
        self.end_ids = end_ids
        self.min_new = min_new
        self.tokens: list[int] = []
        self.matcher: LLMatcher | None = None
        self.shares = True
        """Whether the matcher shares what it learns with other rows', their faults included."""
        self.has_ended = False
        self.fault = ""

    def start(self, matcher: "LLMatcher", *, shares: bool) -> None:
        """Takes a matcher at the start of an output, and follows the tokens there are."""
        self.matcher, self.shares = matcher, shares
        matcher.consume_tokens(self.tokens)

    def follow(self, tokens: Sequence[int]) -> None:
        """Goes on by tokens of the output, up to the first that ends it."""
        if self.has_ended or self.matcher is None:
            return
        end = next((place for place, token in enumerate(tokens) if token in self.end_ids), None)
        self.has_ended = end is not None
        self.tokens += tokens[:end]
        self.matcher.consume_tokens(list(tokens[:end]))


class GrammarRows:
    """The matchers of the rows that have a grammar."""

    def __init__(self, matchers: Matchers, *, device: torch.device) -> None:
        self._matchers = matchers
        self._device = device
        self._rows: dict[int, _HeldRow] = {}
        self._executor: LLExecutor | None = None
        self._host = torch.empty(0, dtype=torch.int32)
        self._ceilings = _ceilings_of_bytes().to(device)

    @property
    def holds_any(self) -> bool:
        """Whether a row has a grammar; rows of finished requests count until they are taken again."""
        return bool(self._rows)

    def holds(self, rows: IntColumn) -> bool:
        """Says whether any of some rows has a grammar."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(rows.tolist())

    def begin(
        self,
        row: int,
        grammar: str,
        output_ids: Sequence[int] = (),
        *,
        end_ids: Sequence[int] = (),
        min_new_tokens: int = 0,
    ) -> None:
        """Holds a row to a grammar from here on; a fault shows in the next `mask`.

        `output_ids` were generated before: the request comes back after it was preempted. `end_ids` end
        the request: where the grammar is complete they are allowed, all of them, and from their first on
        nothing else is. None: the tokenizer's end of sequence. Before `min_new_tokens` they are allowed
        only where nothing else is. Waits for a grammar that is not compiled yet.
        """
        state = self._rows[row] = _HeldRow(grammar, tuple(end_ids), min_new_tokens)
        try:
            state.start(self._matchers.matcher(grammar), shares=True)
        except ValueError as error:
            state.fault = str(error)
            return
        state.end_ids = state.end_ids or (self._matchers.tokenizer.eos_token,)
        state.follow(output_ids)

    def end(self, row: int) -> None:
        """Lets a row go, if it was held to a grammar."""
        self._rows.pop(row, None)

    def advance(self, rows: IntColumn, tokens: IntColumn | NDArray[np.int64]) -> None:
        """Takes the tokens that a step sampled, one for each of `rows`; a fault shows in the next `mask`."""
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            state = self._rows.get(row)
            if state is not None and not state.fault:
                state.follow([token])

    def mask(self, logits: Tensor, rows: IntColumn) -> dict[int, str]:
        """Sets what may not come next to -inf, in place.

        `logits` are `[len(rows), vocab_size]` of any float dtype, each row's own. Rows without a grammar
        stay as they are, and so does a row that can't go on: it is in what is returned, with the reason,
        now and until it is let go. What its request was given so far may be no whole output.
        """
        faults, places = self._filled(rows)
        if places:
            self._apply(logits, places)
        return faults

    def faults(self, rows: IntColumn) -> dict[int, str]:
        """Gives what `mask` does, on a rank that follows the rows' tokens and has no logits."""
        return self._filled(rows)[0]

    def _filled(self, rows: IntColumn) -> tuple[dict[int, str], list[int]]:
        """Fills the host memory with the rows' bits; gives the faults, and the places of rows with bits."""
        held = {place: self._rows[row] for place, row in enumerate(rows.tolist()) if row in self._rows}
        if held:
            self._fill(self._bits(len(held)), list(held.values()))
        return {int(rows[place]): state.fault for place, state in held.items() if state.fault}, list(held)

    def _bits(self, num_rows: int) -> NDArray[np.int32]:
        """Gives the host memory of some rows' bits; the last step's are overwritten."""
        if len(self._host) < num_rows:
            num_words = -(-self._matchers.vocab_size // _WORD_BITS)
            self._host = torch.empty(
                (num_rows, num_words), dtype=torch.int32, pin_memory=self._device.type == "cuda"
            )
        return self._host.numpy()[:num_rows]

    def _fill(self, bits: NDArray[np.int32], states: list[_HeldRow]) -> None:
        from llguidance import LLExecutor  # noqa: PLC0415 - an extra
        from llguidance.numpy import fill_next_token_bitmask_par  # noqa: PLC0415 - the same

        working = [
            (state.matcher, place)
            for place, state in enumerate(states)
            if state.matcher is not None and not state.fault and not state.has_ended
        ]
        if working:
            self._executor = self._executor or LLExecutor()
            fill_next_token_bitmask_par(self._executor, working, bits)
        for place, state in enumerate(states):
            if state.has_ended:
                bits[place] = 0
                _set_bits(bits[place].view(np.uint32), state.end_ids)
                continue
            if not state.fault and state.matcher is not None and state.matcher.is_error():
                self._fill_again(bits[place : place + 1], state)
            if state.fault:
                bits[place] = -1
            else:
                _place_ends(bits[place].view(np.uint32), state, self._matchers.tokenizer.eos_token)

    def _fill_again(self, bits: NDArray[np.int32], state: _HeldRow) -> None:
        """Fills a row's bits by a matcher of its own, or sets the row's fault.

        A matcher that exceeds a limit takes all along that share its lexer.
        """
        from llguidance.numpy import fill_next_token_bitmask  # noqa: PLC0415 - an extra

        assert state.matcher is not None, "a row without a matcher has a fault"
        if state.shares:
            self._matchers.forget(state.grammar)
            try:
                state.start(self._matchers.compile(state.grammar), shares=False)
            except ValueError as error:
                state.fault = str(error)
                return
            fill_next_token_bitmask(state.matcher, bits)
        state.fault = fault_of(state.matcher)

    def _apply(self, logits: Tensor, places: list[int]) -> None:
        """Lowers the logits to their ceilings; this is several times faster than to fill where a mask is."""
        if self._ceilings.dtype != logits.dtype:
            self._ceilings = self._ceilings.to(logits.dtype)
        octets = self._host[: len(places)].to(self._device, non_blocking=True).view(torch.uint8)
        ceilings = self._ceilings.index_select(0, octets.flatten().int()).view(len(places), -1)
        ceilings = ceilings[:, : logits.shape[1]]
        if len(places) == len(logits):
            torch.minimum(logits, ceilings, out=logits)
        else:
            index = torch.tensor(places).to(self._device, non_blocking=True)
            logits.index_copy_(0, index, torch.minimum(logits.index_select(0, index), ceilings))


def _ceilings_of_bytes() -> Tensor:
    """Gives `[256, 8]`: for each byte and each of its bits, from the lowest, what a logit may be."""
    is_set = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(is_set == 1, torch.inf, -torch.inf)


def _place_ends(bits: Bits, state: _HeldRow, eos: int) -> None:
    """Allows a row's own end ids where llguidance allows the tokenizer's, if it is not too early."""
    word, bit = divmod(eos, _WORD_BITS)
    is_complete = bool(bits[word] >> np.uint32(bit) & np.uint32(1))
    if eos not in state.end_ids:
        _clear_bits(bits, (eos,))
    if is_complete:
        _set_bits(bits, state.end_ids)
    if len(state.tokens) < state.min_new:
        before = bits.copy()
        _clear_bits(bits, state.end_ids)
        if not bits.any():
            bits[:] = before


def _set_bits(bits: Bits, ids: Sequence[int]) -> None:
    for token in ids:
        bits[token // _WORD_BITS] |= np.uint32(1 << token % _WORD_BITS)


def _clear_bits(bits: Bits, ids: Sequence[int]) -> None:
    for token in ids:
        bits[token // _WORD_BITS] &= ~np.uint32(1 << token % _WORD_BITS)
