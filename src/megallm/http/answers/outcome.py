"""What came of one request, counted as its choices end: for its response, the access log and its trace."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct


class Usage(Struct):
    """The token counts of a request; each prompt counts once, however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_json(self) -> dict[str, object]:
        """Gives the object that responses carry."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Outcome:
    """The counts of one request. Its owner is the request's task."""

    def __init__(self) -> None:
        self.usage = Usage()
        self._reasons = Counter[str]()
        self._first_token_s: float | None = None
        self._queue_s: float | None = None

    def add_first_token(self, seconds: float) -> None:
        """Counts the first token of a choice, so long after the request came; the earliest is told."""
        self._first_token_s = _least(self._first_token_s, seconds)

    def add_end(self, reason: str, num_tokens: int, queue_s: float | None) -> None:
        """Counts a choice that has ended. `queue_s`: from the request to its first step, where known."""
        self.usage.completion_tokens += num_tokens
        self._reasons[reason] += 1
        if queue_s is not None:
            self._queue_s = _least(self._queue_s, queue_s)

    def as_noted(self) -> dict[str, object]:
        """Gives what an exchange notes of it."""
        seconds = {"first_token_seconds": self._first_token_s, "queue_seconds": self._queue_s}
        return {
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "output_tokens": self.usage.completion_tokens,
            "finished": dict(self._reasons),
            **{name: round(value, 4) for name, value in seconds.items() if value is not None},
        }


def queue_s_of(events: Sequence[tuple[str, float]], began_s: float) -> float | None:
    """Gives how long a request waited for its first step, None where it had none.

    `events` are the engine's, on the loop's clock; `began_s`, on the same one, is when the request came.
    """
    admitted_s = next((time_s for what, time_s in events if what == "add_context"), None)
    return None if admitted_s is None else max(admitted_s - began_s, 0.0)


def _least(before: float | None, seconds: float) -> float:
    return seconds if before is None else min(before, seconds)
