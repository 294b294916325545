"""The progress bar of a sync call: prompts done, tokens per second, time left; on stderr."""

import sys
import time

from tqdm import tqdm

from megallm.core_async.intake import Call
from megallm.core_async.messages import Completion


class _Bar(tqdm):  # pyright: ignore[reportMissingTypeArgument] - generic in its stubs alone
    """tqdm without its monitor thread."""

    monitor_interval = 0


class ProgressBar:
    """Counts one call's tokens and completions into a bar; implements `generation.ProgressReader`.

    Written in the engine's loop and closed by the caller once the call is over.
    """

    def __init__(self, call: Call) -> None:
        self._bar = _Bar(total=len(call.entries), unit="prompt", dynamic_ncols=True, file=sys.stderr)
        self._prompt_lengths = {entry.request_id: len(entry.token_ids) for entry in call.entries}
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._began = time.monotonic()
        self._bar.update(sum(entry.request is None for entry in call.entries))

    def add_tokens(self, num_tokens: int) -> None:
        """Counts new output tokens."""
        self._num_output_tokens += num_tokens
        self._show_rates()
        self._bar.update(0)

    def add_completion(self, completion: Completion) -> None:
        """Counts a prompt that is done."""
        self._num_prompt_tokens += self._prompt_lengths[completion.request_id]
        self._show_rates()
        self._bar.update(1)

    def close(self) -> None:
        """Leaves the bar as it is, with the final rates."""
        self._show_rates()
        self._bar.refresh()
        self._bar.close()

    def _show_rates(self) -> None:
        elapsed = max(time.monotonic() - self._began, 1e-9)
        prompt_rate, output_rate = self._num_prompt_tokens / elapsed, self._num_output_tokens / elapsed
        self._bar.set_postfix_str(
            f"prompt {prompt_rate:,.0f} tok/s, output {output_rate:,.0f} tok/s", refresh=False
        )


def wants_bar(num_prompts: int, *, progress: bool | None) -> bool:  # the public argument's value
    """Gives whether to show a bar: as asked, else for more than one prompt on a terminal."""
    return (num_prompts > 1 and sys.stderr.isatty()) if progress is None else progress
