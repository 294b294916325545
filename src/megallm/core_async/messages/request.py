"""What a request is, from the facade to the scheduler and the detokeniser."""

from msgspec import Struct

from megallm.core_async.messages.columns import Ints, RequestId


class Sampling(Struct, frozen=True, gc=False):
    """How one request's tokens are chosen: resolved and checked numbers, never None."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 0.0
    """0 is off."""
    min_p: float = 0.0
    """0 is off."""
    seed: int = 0
    """0 .. 2**63 - 1. With the position of the token it fixes the random number that is drawn."""
    wants_log_probs: bool = False
    """Ask for the log-probability of each chosen token."""
    num_top: int = 0
    """With `wants_log_probs`: how many of the likeliest tokens to report beside the chosen one."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token generated before; 0 is off."""
    frequency_penalty: float = 0.0
    """Taken off the logit once for each time the token was generated; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens of prompt and output; 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    grammar: str = ""
    """What the output has to match, as llguidance's grammar in JSON; empty is anything."""

    @property
    def needs_history(self) -> bool:
        """Whether the next token depends on the earlier ones other than through the model."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.grammar
        )


class TextSpec(Struct, frozen=True, gc=False):
    """What the detokeniser does with one request's tokens."""

    request_id: RequestId
    stop_words: tuple[str, ...] = ()
    keep_stop: bool = False
    """Leave the stop word (and the end-of-sequence token) in the text."""
    is_streamed: bool = False
    """`Delta`s as tokens come, instead of one `Completion` at the end."""
    reports_progress: bool = False
    """`Progress` after each step, beside the completions."""
    tracks_tokens: bool = False
    """Report when each token came."""
    wants_log_probs: bool = False
    num_top: int = 0
    """How many of the likeliest tokens to report at each place."""
    num_cached_tokens: int = 0
    """Filled in by the scheduler, as are the next, when the request has its first result; see Finished.
    A request that a stop word ends has no `Finished` of the scheduler's."""
    events: tuple[tuple[str, float], ...] = ()
    policy_epoch: tuple[tuple[int, int], ...] | None = None
    kv_cache_epoch: tuple[tuple[int, int], ...] | None = None


class NewRequest(Struct, frozen=True, gc=False):
    """One prompt as the scheduler takes it: already checked against the engine's limits."""

    request_id: RequestId
    prompt: Ints
    max_new_tokens: int
    """Prompt and output together fit max_sequence_length; 0 only where `scores_prompt`."""
    stop_token_ids: tuple[int, ...]
    """Ids that end the request; the id itself is kept as the last generated token."""
    sampling: Sampling
    text: TextSpec
    min_new_tokens: int = 0
    """Stop ids are not sampled before so many tokens."""
    priority: int = 0
    """The lower, the sooner it is admitted and the later it yields; first come first served within one."""
    salt: str = ""
    """Prefixes are shared only within one salt."""
    shares_prefix: bool = False
    """Its blocks may be shared although prefix caching is off: it is one of several forks of a prompt."""
    scores_prompt: bool = False
    """Report the log-probability of each prompt token after the first, and its likeliest rivals."""
