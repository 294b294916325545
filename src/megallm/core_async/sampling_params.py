"""The public SamplingParams: megatron-core's fields and ours. Knows the fields, not their checks."""

from dataclasses import dataclass
from typing import Any

from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams


@dataclass
class SamplingParams(MegatronSamplingParams):
    """How the tokens of one prompt are chosen, and when they end.

    megatron-core's fields keep their meaning: `temperature` 0 is greedy, `top_k` 0 and `top_p` 0
    are off, `num_tokens_to_generate` None fills the context, `termination_id` None is the
    tokenizer's eod, with the other ends that its checkpoint names, and -1 is never. A plain
    megatron-core object is accepted wherever this one is.
    """

    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are left out; 0 is off."""
    seed: int | None = None
    """0 .. 2**63 - 1: the same text every time, whatever runs beside it. None: the engine chooses."""
    stop_token_ids: list[int] | None = None
    """Ids that end the output, beside `termination_id`."""
    ignore_eos: bool = False
    """Do not end at the tokenizer's eod; the same as `termination_id=-1`."""
    min_tokens: int = 0
    """Ids that end the output are not sampled before so many tokens."""
    presence_penalty: float = 0.0
    """-2 .. 2: taken off the logit of every token that the output holds."""
    frequency_penalty: float = 0.0
    """-2 .. 2: taken off the logit once for each time the output holds the token."""
    repetition_penalty: float = 1.0
    """0.001 .. 1000: divides positive, multiplies negative logits of prompt and output tokens; 1 is off."""
    logit_bias: dict[int, float] | None = None
    """Token id -> what is added to its logit, -100 .. 100."""
    json_schema: dict[str, Any] | str | bool | type | None = None
    """The output is JSON of this schema: a dict, its text, True for any JSON, or a pydantic model."""
    regex: str | None = None
    """The output matches this expression, whole."""
    choice: list[str] | None = None
    """The output is one of these."""
    grammar: str | None = None
    """The output matches this grammar: Lark, in llguidance's variant, or GBNF."""
    priority: int = 0
    """The lower, the sooner it is admitted and the later it yields; first come first served within one."""
    cache_salt: str = ""
    """Cached prefixes are shared only among requests of one salt."""
