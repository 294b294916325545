"""Which tokens' states go on from the last layer: those whose logits are wanted, where nobody else looks.

Of a prompt only the last token's are. What comes after the last layer's attention is a product a token, and
the keys and values of all are in the cache by then: a thirty-second of a prompt's work, of 32 layers, is
not done. Knows modules' hooks and a step's inputs; knows no layer.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from megallm.core_async.device.hooks import hooks_of
from megallm.core_async.device.step_inputs import StepInputs


class WantedRows:
    """For one bound model. Hooks on what the states pass before the output layer see all of them."""

    def __init__(self, passed: Iterable[nn.Module | None]) -> None:
        """`passed`: the modules from the last layer's end to the output layer."""
        self._hooks = hooks_of(module for module in passed if module is not None)

    def of(self, inputs: StepInputs) -> Tensor | None:
        """Gives the tokens whose states are wanted, int32 or int64; None where all are."""
        tokens = inputs.logit_tokens
        if tokens is None or inputs.scored_tokens is not None or any(self._hooks):
            return None
        return tokens if len(tokens) < inputs.batch.num_tokens else None
