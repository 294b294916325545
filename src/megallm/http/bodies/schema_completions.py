"""The body of a completions request."""

from typing import Annotated

from msgspec import Meta

from megallm.http.bodies.schema import Count, GenerationFields

DEFAULT_MAX_TOKENS = 16
"""The protocol's, where the request does not say."""


class CompletionRequest(GenerationFields, kw_only=True):
    """A text, or token ids, to go on from; or several of one kind."""

    prompt: str | list[int | str | list[int]]
    echo: bool | None = None
    """The choices begin with the prompt, also among the log-probs."""
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    """How many of the likeliest tokens are reported beside the chosen one; 0 is the chosen one alone."""
    add_special_tokens: bool | None = None
    """False: put no bos before a text, although the tokenizer would."""
    best_of: Count | None = None
    """Refused unless it changes nothing."""
    suffix: str | None = None
    """Refused."""
