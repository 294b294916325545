"""What changes some rows' logits before a token is chosen: penalties, biases, ids that may not come yet.

Knows logits, rows and tokens. Counts of generated tokens are kept on the device, so that a step needs
nothing from the host; rows without a rule cost one look at a host array.
"""

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from megallm.core_async.device.rows import IntColumn, column_of
from megallm.core_async.messages import RowSetup

_NO_LINE = -1


class _Additions(Struct, frozen=True, eq=False):
    """What is added to one row's logits."""

    ids: NDArray[np.int64]
    values: NDArray[np.float32]
    until: int | None
    """The first position that it no longer holds for; None is no end."""


class LogitRules:
    """The rules of all rows. The rank's thread alone changes it: `set_up` before a step, `observe` after."""

    def __init__(self, *, max_requests: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._has_rule = np.zeros(max_requests, dtype=np.bool_)
        self._additions: dict[int, list[_Additions]] = {}
        self._line = np.full(max_requests, _NO_LINE, dtype=np.int64)
        """Where a row with penalties has its counts."""
        self._free_lines: list[int] = []
        self._penalties = np.zeros((max_requests, 3), dtype=np.float32)
        """Presence, frequency, repetition."""
        self._num_generated = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        """`[lines, vocab]`: how often a row generated each id."""
        self._is_known = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        """`[lines, vocab]`: ids of its prompt and output."""

    def set_up(self, setups: list[RowSetup]) -> None:
        """Takes the rules of new rows, and forgets those of the rows' last requests."""
        for setup in setups:
            self._forget(setup.row)
            sampling = setup.sampling
            added: list[_Additions] = []
            if sampling.logit_bias:
                ids, values = zip(*sampling.logit_bias, strict=True)
                added.append(_Additions(np.array(ids), np.array(values, dtype=np.float32), None))
            if setup.masked_ids:
                ids = np.array(setup.masked_ids)
                added.append(
                    _Additions(ids, np.full(len(ids), -np.inf, dtype=np.float32), setup.masked_until)
                )
            if added:
                self._additions[setup.row] = added
            if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1:
                self._remember(setup)
            self._has_rule[setup.row] = bool(added) or self._line[setup.row] != _NO_LINE

    def apply_to(self, rows: IntColumn) -> bool:
        """Says whether any of some rows has a rule."""
        return bool(self._has_rule[rows].any())

    def adjusted(self, logits: Tensor, rows: IntColumn, positions: IntColumn) -> Tensor:
        """Gives `[rows, vocab]` with the rows' rules applied: float32 and new, or `logits` itself if none.

        `positions` are the places that the next tokens take.
        """
        if not self.apply_to(rows):
            return logits
        logits = logits.to(torch.float32, copy=True)
        places = np.flatnonzero(self._line[rows] != _NO_LINE)
        if len(places):
            self._penalise(logits, places, rows[places])
        for place in np.flatnonzero(self._has_rule[rows]).tolist():
            for added in self._additions.get(int(rows[place]), ()):
                if added.until is None or positions[place] < added.until:
                    logits[place].index_add_(0, self._on(added.ids), self._on(added.values))
        return logits

    def observe(self, rows: IntColumn, tokens: Tensor) -> None:
        """Counts the tokens, `[rows]` on the device, that the rows have just sampled."""
        places = np.flatnonzero(self._line[rows] != _NO_LINE)
        if not len(places):
            return
        lines = self._on(self._line[rows[places]])
        sampled = tokens.index_select(0, self._on(places))
        once = torch.ones_like(sampled, dtype=torch.int32)
        self._num_generated.index_put_((lines, sampled), once, accumulate=True)
        self._is_known[lines, sampled] = True

    def _penalise(self, logits: Tensor, places: NDArray[np.int64], rows: IntColumn) -> None:
        places_t, lines = self._on(places), self._on(self._line[rows])
        presence, frequency, repetition = self._on(self._penalties[rows]).unbind(1)
        some = logits.index_select(0, places_t)
        repeated = torch.where(some > 0, some / repetition[:, None], some * repetition[:, None])
        some = torch.where(self._is_known.index_select(0, lines), repeated, some)
        counts = self._num_generated.index_select(0, lines)
        some -= counts * frequency[:, None] + (counts > 0) * presence[:, None]
        logits.index_copy_(0, places_t, some)

    def _remember(self, setup: RowSetup) -> None:
        sampling = setup.sampling
        self._penalties[setup.row] = (
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
        )
        if not self._free_lines:
            self._add_lines()
        line = self._free_lines.pop()
        self._line[setup.row] = line
        known = torch.from_numpy(column_of(setup.known).astype(np.int64)).to(self._device)
        self._num_generated[line] = torch.bincount(known[setup.num_prompt :], minlength=self._vocab_size)
        self._is_known[line] = torch.bincount(known, minlength=self._vocab_size) > 0

    def _add_lines(self) -> None:
        """Doubles the lines: penalties are rare, and a line for every row is much memory."""
        num_lines = len(self._is_known)
        added = max(4, num_lines)
        self._num_generated = torch.cat(
            (self._num_generated, self._num_generated.new_zeros(added, self._vocab_size))
        )
        self._is_known = torch.cat((self._is_known, self._is_known.new_zeros(added, self._vocab_size)))
        self._free_lines += range(num_lines, num_lines + added)

    def _forget(self, row: int) -> None:
        self._additions.pop(row, None)
        if self._line[row] != _NO_LINE:
            self._free_lines.append(int(self._line[row]))
            self._line[row] = _NO_LINE

    def _on(self, column: NDArray[np.int64] | NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(column).to(self._device, non_blocking=True)
