"""From logits to the rows' next tokens: rules, grammars, the sampler, and log-probs of what it chose.

Owns the rules and the grammars of all rows, and writes the token that each row sampled last. Knows logits,
rows and a step's inputs; knows no model and no rank.
"""

import torch
from torch import Tensor

from megallm.core_async.config import EngineConfig
from megallm.core_async.device.grammar import GrammarRows
from megallm.core_async.device.log_probs import LogProbs, log_probs_of
from megallm.core_async.device.logit_rules import LogitRules
from megallm.core_async.device.queued_step import StepTensors
from megallm.core_async.device.rows import IntColumn, Rows, column_of
from megallm.core_async.device.sampler import Sampled, processed, sample
from megallm.core_async.device.step_inputs import StepInputs
from megallm.core_async.matchers import Matchers
from megallm.core_async.messages import RowSetup


class TokenChoice:
    """Chooses the rows' tokens. The rank's thread alone calls it: `set_up` before a step, the rest after."""

    def __init__(
        self, rows: Rows, config: EngineConfig, matchers: Matchers | None, *, device: torch.device
    ) -> None:
        """`matchers`: for requests that bring a grammar; without it there are none."""
        self._rows = rows
        self._processes_log_probs = config.processes_log_probs
        self._rules = LogitRules(
            max_requests=config.max_requests, vocab_size=config.vocab_size, device=device
        )
        self._grammars = None if matchers is None else GrammarRows(matchers, device=device)

    def set_up(self, new_rows: list[RowSetup]) -> None:
        """Takes the rules of the requests that take rows."""
        self._rules.set_up(new_rows)
        if self._grammars is None:
            return
        for setup in new_rows:
            if not setup.sampling.grammar:
                self._grammars.end(setup.row)
                continue
            self._grammars.begin(
                setup.row,
                setup.sampling.grammar,
                column_of(setup.known)[setup.num_prompt :].tolist(),
                end_ids=setup.end_ids,
                min_new_tokens=max(setup.masked_until - setup.num_prompt, 0),
            )

    def has_rules(self, rows: IntColumn) -> bool:
        """Says whether some row's logits are changed before a token is chosen."""
        return self._rules.apply_to(rows) or self._grammars_of(rows) is not None

    def choose(self, logits: Tensor, inputs: StepInputs) -> StepTensors:
        """Chooses the step's tokens, which are the rows' next inputs; and gives their log-probs if asked."""
        rows, sampling = inputs.host_sampled_rows, inputs.sampling
        adjusted = self._rules.adjusted(logits, rows, inputs.sampled_positions)
        faults: dict[int, str] = {}
        grammars = self._grammars_of(rows)
        if grammars is not None:
            adjusted = adjusted.clone() if adjusted is logits else adjusted
            faults = grammars.mask(adjusted, rows)
        sampled = sample(adjusted, sampling, inputs.sampled_positions)
        self._take(sampled, inputs, grammars)
        log_probs: LogProbs | None = None
        if sampling.wants_log_probs.any():
            source = processed(adjusted, sampling) if self._processes_log_probs else logits
            log_probs = log_probs_of(source, sampled.tokens, num_top=inputs.num_top)
        return StepTensors(sampled=sampled, log_probs=log_probs, failed=_failed(rows, faults))

    def follow(self, sampled: Sampled, inputs: StepInputs) -> list[tuple[int, str]]:
        """Takes what another rank chose, and gives the rows that failed: faults of grammars show here too."""
        rows = inputs.host_sampled_rows
        grammars = self._grammars_of(rows)
        faults = {} if grammars is None else grammars.faults(rows)
        self._take(sampled, inputs, grammars)
        return _failed(rows, faults)

    def _take(self, sampled: Sampled, inputs: StepInputs, grammars: GrammarRows | None) -> None:
        """Keeps what the rows' next step needs of their tokens."""
        rows = inputs.host_sampled_rows
        self._rows.last_tokens.index_copy_(0, inputs.sampled_rows, sampled.tokens)
        self._rules.observe(rows, sampled.tokens)
        if grammars is not None:  # the next step's mask needs the tokens: on a GPU these rows wait for them
            grammars.advance(rows, sampled.tokens.cpu().numpy())

    def _grammars_of(self, rows: IntColumn) -> GrammarRows | None:
        """Gives the grammars where some of the rows has one."""
        return self._grammars if self._grammars is not None and self._grammars.holds(rows) else None


def _failed(rows: IntColumn, faults: dict[int, str]) -> list[tuple[int, str]]:
    return [(place, faults[row]) for place, row in enumerate(rows.tolist()) if row in faults]
