"""A streamed choice's deltas, gathered into the completion that it would have been without streaming."""

from megallm.core_async.messages import Completion, Delta, Finished


class Gathered:
    """What one choice has streamed so far."""

    __slots__ = ("_delta", "_log_probs", "_texts", "last_s", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.last_s: float | None = None
        """When the last of it came; None before the first."""
        self._texts: list[str] = []
        self._log_probs: list[float] | None = None
        self._delta: Delta | None = None

    def add(self, delta: Delta, time_s: float) -> None:
        """Adds the next delta."""
        self._delta, self.last_s = delta, time_s
        self.token_ids += delta.token_ids
        self._texts.append(delta.text)
        if delta.log_probs is not None:
            if self._log_probs is None:
                self._log_probs = []
            self._log_probs += delta.log_probs

    def ending(self) -> Finished:
        """Gives why it ended, and what the engine recorded of it."""
        delta = self._delta
        assert delta is not None, "the last delta has not come"
        assert delta.finish_reason is not None, "the last delta has not come"
        return delta.ending or Finished(delta.request_id, delta.finish_reason, delta.stop_reason)

    def completion(self) -> Completion:
        """Gives the whole of it, once the last delta has come."""
        ending = self.ending()
        return Completion(
            request_id=ending.request_id,
            text="".join(self._texts),
            token_ids=self.token_ids,
            finish_reason=ending.finish_reason,
            stop_reason=ending.stop_reason,
            num_cached_tokens=ending.num_cached_tokens,
            first_token_s=None,
            last_token_s=None,
            log_probs=self._log_probs,
            num_preemptions=ending.num_preemptions,
            events=ending.events,
            policy_epoch=ending.policy_epoch,
            kv_cache_epoch=ending.kv_cache_epoch,
        )
